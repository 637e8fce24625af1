"""One warm Spark server for all tests of a run."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline_platform import shipping, spark_server
from resources.spark import WARM, SparkResource


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
    try:
        yield WarmSpark(folder, server)
    finally:
        spark_server.stop(folder)


@pytest.fixture
def spark(warm_spark: WarmSpark) -> Iterator[SparkResource]:
    """A Spark resource on the warm server; what the test opened is closed after it."""
    with closing(warm_spark.resource()) as resource:
        yield resource
