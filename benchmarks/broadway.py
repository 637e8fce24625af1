"""Broadway 1.3.0 on this machine: what whole runs are measured against.

It decodes the same payloads, which it has in memory, routes them to two batchers and acknowledges to a counter.
*memory* counts batches of 100. *files* writes a file of JSON lines for each batch of 1,000, and syncs none.

It needs Elixir (Debian's package). `BROADWAY` may name a folder whose `lib` has it built, with Jason; else Hex
gives it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.events import payloads

_SCRIPT = Path(__file__).with_suffix(".exs")
_DISTINCT = 1_000
"""Payloads that come again and again, or it would need a gigabyte for them."""


class MissingError(Exception):
    """It is not here; says what is."""


def seconds(mode: str, messages: int) -> float:
    """How long it takes for so many messages, in `memory` or to `files`.

    Raises:
        MissingError: There is no Elixir, or no Broadway.
    """
    if shutil.which("elixir") is None:
        raise MissingError("elixir is not installed")
    environment, libraries = os.environ | {"LANG": "C.UTF-8"}, list[str]()
    if built := os.environ.get("BROADWAY"):
        environment["ERL_LIBS"] = f"{built}/lib"
        libraries = ["-pa", f"{built}/lib/consolidated"]
    elif subprocess.run(["mix", "local.hex", "--if-missing", "--force"], check=False, capture_output=True).returncode:
        raise MissingError("Hex cannot be reached, and BROADWAY names no folder where Broadway is built")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "payloads")
        file.write_bytes(b"\n".join(payloads(_DISTINCT)))
        command = ["elixir", *libraries, str(_SCRIPT), mode, str(messages), str(file), folder]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise MissingError(f"Broadway does not run: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.splitlines()[-1])
