"""One warm Spark server for all tests of a run."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline_platform.spark import server as spark_server
from pipeline_platform.spark import shipping
from resources.spark import WARM, SparkResource

_STOP_AT_THE_END = """
import sys
from pathlib import Path
sys.stdin.read()
from pipeline_platform.spark import server as spark_server
spark_server.stop(Path(sys.argv[1]))
"""
"""Waits for the end of the tests, be it Ctrl-C or a kill, in a process group that Ctrl-C does not reach."""


@dataclass(frozen=True)
class WarmSpark:
    """The tests' server."""

    folder: Path
    server: spark_server.SparkServer

    def resource(self, *packages: str) -> SparkResource:
        """A resource on this server; ships the platform and the tests if no packages are named."""
        shipped = list(packages) or [*shipping.PACKAGES, "tests"]
        return SparkResource(remote=WARM, state_folder=str(self.folder), packages=shipped)


@pytest.fixture(scope="session")
def warm_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmSpark]:
    """A Spark server of the tests' own, in a folder of their own; started by the first test that wants it."""
    folder = tmp_path_factory.mktemp("spark")
    server = spark_server.start(folder, cores=2)
    stop = [sys.executable, "-c", _STOP_AT_THE_END, folder]
    with subprocess.Popen(stop, stdin=subprocess.PIPE, process_group=0) as stopping:
        yield WarmSpark(folder, server)
    assert not stopping.returncode


@pytest.fixture
def spark(warm_spark: WarmSpark) -> Iterator[SparkResource]:
    """A Spark resource on the warm server; what the test opened is closed after it."""
    with closing(warm_spark.resource()) as resource:
        yield resource
