"""A source in memory, and the steps of a receive called one by one: no Spark, no Dagster, no server."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, PrivateAttr

from pipeline_platform.lake.decision import decide, publish
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import Range
from pipeline_platform.lake.receives import Receive, Receives
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.message import MESSAGES, Message
from pipeline_platform.model.options import Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import Backlog, Refused, Share, Source
from pipeline_platform.tasks import receive as receiving
from pipeline_platform.tasks.handle import Handle

WINDOW = "2026-01-01T0000"


class Memory(Source):
    """Delivers what it was given; remembers what it was told."""

    name: str = "memory"
    deliveries_: tuple[tuple[str, bytes | None], ...] = ()
    _told: list[tuple[str, str, list[str]]] = PrivateAttr(default_factory=list)

    @property
    def told(self) -> list[tuple[str, str, list[str]]]:
        """`(what, ack_ref, ack_ids)` of every call."""
        return self._told

    def backlog(self) -> Backlog:
        return Backlog(len(self.deliveries_))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        return [Share(messages=demand)]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        ids = [one for one, _ in self.deliveries_]
        yield self.deliveries(
            message_id=ids,
            data=[data for _, data in self.deliveries_],
            ack_id=[f"ack-{one}" for one in ids],
            ack_ref="q",
        )

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        self._told.append(("ack", ack_ref, list(ack_ids)))
        return []

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        self._told.append((f"nack:{delay_s}", ack_ref, list(ack_ids)))
        return []


class Row(BaseModel):
    """What the table of `Keeping` holds."""

    text: str


class Keeping(Pipeline):
    """Keeps the text of every message; one that says `fail` fails."""

    name = "keeping"
    producer = Producer(source="memory")
    batchers = {"kept": TableBatcher(schema=Row)}

    def handle_message(self, message: Message, context: Any) -> Message:
        text = message.data.decode()
        if text.startswith("fail"):
            raise ValueError(text)
        return message.put_batcher("kept").put_data(Row(text=text))


def batch_of(*payloads: bytes | None, window: str = WINDOW, attempt: int = 1) -> pa.RecordBatch:
    """Received messages as handling reads them, named m0, m1, ..."""
    count = len(payloads)
    names = [f"m{index}" for index in range(count)]
    columns = {
        "source": ["memory"] * count,
        "message_id": names,
        "data": list(payloads),
        "metadata": [None] * count,
        "ack_ref": ["q"] * count,
        "ack_id": [f"ack-{name}" for name in names],
        "attempt": [attempt] * count,
        "redelivered": [False] * count,
        "published_at": [None] * count,
        "received_at": [datetime(2026, 1, 1, tzinfo=UTC)] * count,
        "receive_id": ["r1"] * count,
        "window": [window] * count,
        "position": list(range(count)),
    }
    return pa.RecordBatch.from_pydict(columns, schema=pa.schema([*MESSAGES, ("position", pa.int64())]))


def numbered(*payloads: bytes | None) -> tuple[tuple[str, bytes | None], ...]:
    """Deliveries named m0, m1, ..."""
    return tuple((f"m{index}", data) for index, data in enumerate(payloads))


def returned(batches: Iterator[pa.RecordBatch]) -> Manifest:
    """What a task returned."""
    return Manifest.of(pa.Table.from_batches(list(batches)))


def received(lake: Lake, pipeline: str, source: Source, receive_id: str = "r1", window: str = WINDOW) -> Manifest:
    """Receive all that a source has."""
    task = receiving.ReadShares(source, source.plan(1_000_000, 1, receive_id), lake, pipeline, receive_id, window)
    return returned(task(0)) if task.shares else Manifest()


def ranges(manifest: Manifest, pipeline: str, table: str = "messages") -> list[Range]:
    """All rows that were written for a table."""
    files, first = [], 0
    for file in manifest.of_table(table):
        files.append(Range(f"{pipeline}/{table}/{file.path}", file.window, 0, file.rows, first))
        first += file.rows
    return files


def handled(
    lake: Lake, pipeline: type[Pipeline], *payloads: bytes | None, source: Source | None = None, **options: Any
) -> Manifest:
    """Receive payloads and put them through the callbacks."""
    source = source or Memory(deliveries_=numbered(*payloads))
    rows = ranges(received(lake, pipeline.name, source), pipeline.name)
    told = {"context": None, "origin": "source", **options}
    task = Handle(pipeline=pipeline, source=source, lake=lake, receive_id="r1", parts=[rows], **told)
    return returned(task(0))


def rows_of(lake: Lake, pipeline: str, manifest: Manifest, table: str) -> list[dict[str, Any]]:
    """What was written for a table, visible or not."""
    return [
        row
        for file in manifest.of_table(table)
        for row in pq.ParquetFile(lake.open_input(f"{pipeline}/{table}/{file.path}")).read().to_pylist()
    ]


def outcomes(lake: Lake, pipeline: str, manifest: Manifest) -> dict[str, str]:
    """Outcome by message id."""
    return {row["message_id"]: row["outcome"] for row in rows_of(lake, pipeline, manifest, "outcomes")}


def visible(tables: Tables, table: str) -> list[dict[str, Any]]:
    """The rows of a table as every reader sees them."""
    one = tables[table]
    handle = one.open()
    return [
        {**row, "window": file.window}
        for file in one.files(handle)
        for row in pq.ParquetFile(tables.lake.open_input(f"{one.pipeline}/{table}/{file.path}")).read().to_pylist()
    ]


class Run:
    """One receive, a step at a time: as a run of Dagster does them, with time for others in between."""

    def __init__(
        self,
        tables: Tables,
        source: Source,
        receive_id: str,
        *,
        origin: str = "source",
        windows: tuple[str, ...] = (WINDOW,),
        replaces: tuple[str, ...] = (),
        base: int | None = None,
    ) -> None:
        tables.ensure()
        self.tables, self.source = tables, source
        self.receives = Receives(tables.lake, tables.pipeline.name)
        self.receive = Receive(
            receive_id=receive_id,
            pipeline=tables.pipeline.name,
            origin=origin,  # type: ignore[arg-type]
            run_id="run",
            windows=windows,
            demand=1_000,
            base=tables["outcomes"].open().version() if base is None else base,
            replaces=replaces,
            started_at=datetime.now(UTC),
        )
        self.receives.begin(self.receive)

    def work(self) -> "Run":
        """Receive and handle."""
        lake, name, receive_id = self.tables.lake, self.tables.pipeline.name, self.receive.receive_id
        manifest = Manifest()
        for index, share in enumerate(shares := self.source.plan(1_000, 1, receive_id)):
            task = receiving.ReadShares(
                self.source, shares, lake, name, receive_id, share.window or self.receive.window
            )
            manifest += returned(task(index))
        self.receives.keep(self.receive, "receive", manifest)
        task = Handle(
            pipeline=self.tables.pipeline,
            context=None,
            source=self.source,
            origin=self.receive.origin,
            lake=lake,
            receive_id=receive_id,
            parts=[ranges(manifest, name)],
        )
        self.receives.keep(self.receive, "handle", returned(task(0)))
        return self

    def decide(self) -> "Run":
        decide(self.tables, self.receives, self.receive)
        return self

    def publish(self) -> "Run":
        publish(self.tables, self.receives, self.receive)
        return self

    def finish(self) -> "Run":
        """All there is to do, and forget it."""
        self.work().decide().publish()
        self.receives.remove(self.receive.receive_id)
        return self
