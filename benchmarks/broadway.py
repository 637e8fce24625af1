"""Broadway 1.3.0 on this machine, the peer of whole runs.

From memory, it decodes the same payloads, routes them to two batchers and acknowledges to a counter. *memory* counts
batches of 100. *files* writes a file of JSON lines for each batch of 1,000, without a sync. From a real queue, it does
the same with its own connectors and writes a file for each batch.

It needs Elixir (Debian's package). `BROADWAY` may be a folder whose `lib` contains it in compiled form, with Jason;
otherwise Hex provides it. The connectors are needed in compiled form, in `connectors/lib` of a folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.events import payloads

_FOLDER = Path(__file__).parent
_DISTINCT = 1_000
"""Number of distinct payloads, which repeat, because all payloads would need a gigabyte."""


class MissingError(Exception):
    """Elixir or Broadway is missing; the message contains which."""


def seconds(mode: str, messages: int) -> float:
    """Return the seconds that Broadway needs for a number of messages, in `memory` or to `files`.

    Raises:
        MissingError: Elixir or Broadway is missing.
    """
    built = os.environ.get("BROADWAY")
    if built is None and shutil.which("mix"):
        hex_ = ["mix", "local.hex", "--if-missing", "--force"]
        if subprocess.run(hex_, check=False, capture_output=True).returncode:
            raise MissingError("Hex is not reachable, and BROADWAY is not a folder with a built Broadway")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "payloads")
        file.write_bytes(b"\n".join(payloads(_DISTINCT)))
        return _run(built, "broadway.exs", mode, str(messages), str(file), folder)[0]


def of_source(built: Path, place: Sequence[str], messages: int) -> tuple[float, float]:
    """Return the seconds that Broadway needs for the messages of a queue, and its seconds of processor time.

    Args:
        built: Folder with Broadway and its connectors in compiled form.
        place: Name of the connector and the queue's address, as `broadway_source.exs` takes them.
        messages: Number of messages in the queue.

    Raises:
        MissingError: Elixir, Broadway or a connector is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        took, used = _run(str(built), "broadway_source.exs", str(messages), folder, *place)
        lines = sum(file.read_bytes().count(b"\n") for file in Path(folder).iterdir())
    assert lines >= messages
    return took, used


def _run(built: str | None, script: str, *arguments: str) -> list[float]:
    """Run a script with the built libraries; return the numbers in its last line."""
    if shutil.which("elixir") is None:
        raise MissingError("Elixir is not installed")
    environment, libraries = os.environ | {"LANG": "C.UTF-8"}, list[str]()
    if built:
        environment["ERL_LIBS"] = f"{built}/lib:{built}/connectors/lib"
        libraries = ["-pa", f"{built}/lib/consolidated"]
    command = ["elixir", *libraries, str(_FOLDER / script), *arguments]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise MissingError(f"Broadway failed: {done.stderr.strip().splitlines()[-1]}")
    return [float(number) for number in done.stdout.splitlines()[-1].split()]
