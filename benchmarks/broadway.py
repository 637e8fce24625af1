"""Broadway 1.3.0 on this machine, the peer of whole runs.

It decodes the same payloads from memory, routes them to two batchers and acknowledges to a counter. *memory* counts
batches of 100. *files* writes a file of JSON lines for each batch of 1,000, without a sync.

It needs Elixir (Debian's package). `BROADWAY` may be a folder whose `lib` contains it in compiled form, with Jason;
otherwise Hex provides it.
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
"""Number of distinct payloads, which repeat, because all payloads would need a gigabyte."""


class MissingError(Exception):
    """Elixir or Broadway is missing; the message contains which."""


def seconds(mode: str, messages: int) -> float:
    """Return the seconds that Broadway needs for a number of messages, in `memory` or to `files`.

    Raises:
        MissingError: Elixir or Broadway is missing.
    """
    if shutil.which("elixir") is None:
        raise MissingError("Elixir is not installed")
    environment, libraries = os.environ | {"LANG": "C.UTF-8"}, list[str]()
    if built := os.environ.get("BROADWAY"):
        environment["ERL_LIBS"] = f"{built}/lib"
        libraries = ["-pa", f"{built}/lib/consolidated"]
    elif subprocess.run(["mix", "local.hex", "--if-missing", "--force"], check=False, capture_output=True).returncode:
        raise MissingError("Hex is not reachable, and BROADWAY is not a folder with a built Broadway")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "payloads")
        file.write_bytes(b"\n".join(payloads(_DISTINCT)))
        command = ["elixir", *libraries, str(_SCRIPT), mode, str(messages), str(file), folder]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise MissingError(f"Broadway failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.splitlines()[-1])
