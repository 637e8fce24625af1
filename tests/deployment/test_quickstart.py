"""Tutorials, followed as a reader follows them: files, commands, a real Dagster and a real Spark."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copy, copytree

import polars as pl
import pytest

from servers.server import free_ports
from tests.fixtures.documents import DOCS, files
from tests.fixtures.keeper import PROJECT

ONES_OWN = ("make ", "mkdir ", "pip ", "dagster dev ")
"""Commands that prepare the machine or do not end."""


class Reader:
    """A reader with a terminal, a folder and a page of `docs/start`."""

    def __init__(self, folder: Path, page: str, home: str) -> None:
        self.folder, self.page, self.typed = folder, (DOCS / "start" / page).read_text(), 0
        scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIPELINE_"))}
        self.variables = {**kept, "PATH": scripts, "DAGSTER_HOME": str(folder / home)}
        (folder / home).mkdir()

    def type(self, command: str) -> str:
        bash, at = ["bash", "-c", command], {"cwd": self.folder, "env": self.variables}
        done = subprocess.run(bash, **at, capture_output=True, text=True, timeout=240, check=False)
        # `status` reports with its exit code that the daemon does not run yet.
        expected = {0, 1, 2} if "pipeline-platform status" in command else {0}
        assert done.returncode in expected, f"{command}\n{done.stdout[-2_000:]}{done.stderr[-4_000:]}"
        return done.stdout

    def write(self, heading: str) -> None:
        """Write the files of the page in their state after a section."""
        (self.folder / "upto.md").write_text(self.page.partition(f"\n## {heading}\n")[0])
        for name, text in files(self.folder / "upto.md").items():
            (self.folder / name).write_text(text)

    def follow(self, heading: str) -> str:
        """Execute the commands of a section, `status` until nothing is active; return their output."""
        section = self.page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        printed = []
        for line in re.findall(r"^\$ (.*)$", section, re.M):
            command = line.partition("  #")[0].strip()
            if command.startswith("pipeline-platform") and " status" in command:
                self.wait_for(command)
            elif not command.startswith(ONES_OWN) and "DAGSTER_HOME=" not in command:
                printed.append(self.type(command))
                self.typed += 1
        return "".join(printed)

    def wait_for(self, status: str) -> None:
        until = time.monotonic() + 400
        while time.monotonic() < until:
            said = self.type(status)
            if " 0 messages in orders_queue" in said and "in 0 runs" in said and "none under way" in said:
                return
            time.sleep(1)
        raise AssertionError(said)

    @contextmanager
    def dagster(self, *location: str) -> Iterator[None]:
        command = ["dagster", "dev", *location, "-p", str(*free_ports(1))]
        assert f"$ {' '.join(command[:4])} &" in self.page
        with (self.folder / "dagster.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.variables, stdout=log, stderr=log, start_new_session=True
            )
            try:
                yield
            finally:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)


@pytest.mark.timeout(1_200)
@pytest.mark.faults  # two runs, each of which starts Spark: a minute
def test_the_tutorial_ends_as_it_says(tmp_path):
    reader, lake = Reader(tmp_path, "quickstart.md", "dagster"), tmp_path / "dagster/pipeline_platform/lake/orders/lake"
    reader.write("Send messages")
    reader.follow("Send messages")
    with reader.dagster("-m", "orders"):
        looked = reader.follow("Start Dagster")
        assert "ValidationError" in looked
        assert pl.read_delta(str(lake))["number"].to_list() == [1]

        reader.write("Next steps")
        reader.follow("Fix the class and retry")
        rows = pl.read_delta(str(lake)).sort("number")
        assert rows.select("number", "total").rows() == [(1, 9.5), (2, 0.0)]

        assert "1 passed" in reader.follow("Test the callback")
    assert reader.typed == 8


@pytest.mark.timeout(1_200)
@pytest.mark.faults  # a run, which starts Spark
def test_a_pipeline_that_a_command_writes_ends_in_rows(tmp_path):
    for name in ("definitions.py", "workspace.yaml", "dagster.yaml", "pipelines", "resources", "assets", "sensors"):
        (copytree if (PROJECT / name).is_dir() else copy)(PROJECT / name, tmp_path / name)
    reader = Reader(tmp_path, "new.md", ".dagster")
    copy(PROJECT / "dagster.yaml", tmp_path / ".dagster")
    assert "Wrote pipelines/orders.py" in reader.type("pipeline-platform new orders")

    with reader.dagster("-w", "workspace.yaml"):
        printed = reader.follow("Send messages and read rows")

    assert "1 passed" in printed
    assert "│ 1      ┆ one  │" in printed
    assert "ValidationError" in printed
