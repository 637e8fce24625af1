"""The front door: `import pipeline_platform` gives what a pipeline or a connector needs, and loads nothing heavy."""

import subprocess
import sys

LOADED = """
import sys, pipeline_platform
heavy = {"pyspark", "dagster", "pandas", "polars", "deltalake"}
print(*sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
missing = [name for name in pipeline_platform.__all__ if not hasattr(pipeline_platform, name)]
print(*missing)
"""


def test_it_loads_neither_spark_nor_dagster_and_has_every_name():
    said = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    assert said.split() == []


CONNECTOR = """
from collections.abc import Iterator, Sequence
import pyarrow as pa
from pipeline_platform import Backlog, Held, LeasedSource, Refused, Share

class Counter(LeasedSource):
    def backlog(self) -> Backlog: return Backlog(1)
    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]: return [Share(messages=1)]
    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        yield self.deliveries(message_id=["1"], data=[b"1"], ack_id=["1"], ack_ref="c")
    def extend(self, receive_id: str, held: Held) -> bool: return True
    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]: return []
    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]: return []

(batch,) = Counter(name="c").read(Share(messages=1), "r")
print(batch.num_rows)
"""


def test_a_connector_needs_no_other_import():
    said = subprocess.run([sys.executable, "-c", CONNECTOR], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1"]
