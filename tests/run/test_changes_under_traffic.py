"""Old and new code of a pipeline, in turns and at once: deployment, roll-back, retry and replay after a change."""

import enum
import json
import subprocess
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable
from polars.testing import assert_frame_equal
from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.schema_changes import SchemaChangeError
from pipeline_platform.lake.tables import SYSTEM
from servers import spark_jvm
from tests import fixtures
from tests.fixtures.flow import finish, flow_of, rows, run, worked
from tests.fixtures.servers import ready
from tests.fixtures.sinks import iceberg, iceberg_table

pytestmark = pytest.mark.usefixtures("tasks_here")


class Colour(enum.Enum):
    RED = "red"


class MoreColours(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Street(BaseModel):
    street: str


class Address(BaseModel):
    city: str | None = None
    street: str


class Plain(BaseModel):
    number: int


class Noted(Plain):
    note: str | None = None


class Before(Plain):
    """The old code: each field is changed in another way."""

    removed: str | None = None
    old_name: str | None = None
    default: str | None = None
    nested: Street
    shortened: Address
    listed: list[Street]


class After(Plain):
    added: str | None = None
    new_name: str | None = None
    default: str = "none"
    nested: Address
    shortened: Street
    listed: list[Address]


class Coloured(Plain):
    colour: Colour


class Colourful(Plain):
    colour: MoreColours


class Orders(Pipeline):
    """Stores orders; the old code fails a payload with `fail`."""

    name = "orders"
    producer = Producer(source="queue")

    def handle_message(self, message: Message, context: Any) -> Message:
        if self.is_old and b"fail" in message.data:
            raise ValueError("as told")
        ((batcher, options),) = self.batchers.items()
        return message.put_data(message.json(options.table_schema)).put_batcher(batcher)


def version(model: type[BaseModel], *, is_old: bool, batcher: str = "lake") -> type[Orders]:
    return type("Orders", (Orders,), {"is_old": is_old, "batchers": {batcher: TableBatcher(schema=model)}})


NOTED = {"number": 1, "note": "n"}
STREET, CITY, BOTH = {"street": "s"}, {"street": "s", "city": "c"}, {"street": "s", "city": None}
OLD = {"removed": "r", "old_name": "o", "nested": STREET, "shortened": CITY, "listed": [STREET]}
NEW = {"added": "a", "new_name": "m", "default": "d", "nested": CITY, "shortened": STREET, "listed": [CITY]}
EMPTY = dict.fromkeys(("removed", "old_name", "default", "added", "new_name"))
SEEN = {"nested": BOTH, "shortened": BOTH, "listed": [BOTH]}

CHANGES: Mapping[str, tuple[Any, ...]] = {
    # old and new model; old and new payload; rows: old by old code, new by old code, old by new code, new by new code
    "fields": (
        *(Before, After, {"number": 1, **OLD}, {"number": 1, **NEW}),
        {**EMPTY, **SEEN, "removed": "r", "old_name": "o", "shortened": CITY},
        {**EMPTY, **SEEN, "default": "d"},
        {**EMPTY, **SEEN, "default": "none"},
        {**EMPTY, **NEW, "shortened": BOTH},
    ),
    "enum": (
        *(Coloured, Colourful, {"number": 1, "colour": "red"}, {"number": 1, "colour": "blue"}),
        *({"colour": "red"}, None, {"colour": "red"}, {"colour": "blue"}),
    ),
}


class Ground:
    """A queue and a lake that both versions of the code use."""

    def __init__(self, folder: Any) -> None:
        self.folder, self.sinks = folder, {}
        self.queue = TableQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite")
        self.queue.create()

    def handle(self, code: type[Orders], *payloads: dict[str, Any], **asked: Any) -> None:
        self.queue.enqueue(json.dumps(payload).encode() for payload in payloads)
        run(flow_of(self.folder, code, self.queue, sinks=self.sinks), **asked)

    def table(self, code: type[Orders], batcher: str = "lake") -> list[dict[str, Any]]:
        """Return the rows of a table, after other readers have found the same rows."""
        stored = rows(flow_of(self.folder, code, self.queue), batcher)
        table = DeltaTable(f"{self.folder}/lake/orders/{batcher}")
        with duckdb.connect() as connection:
            connection.register("stored", table.to_pyarrow_dataset())
            by_duckdb = pl.from_arrow(connection.sql("SELECT * FROM stored").to_arrow_table())
        for others in (pl.read_delta(table.table_uri), by_duckdb):
            assert_frame_equal(others.select(stored.columns), stored, check_row_order=False)
        return sorted(stored.drop([*SYSTEM.names, "number"], strict=False).to_dicts(), key=str)

    def open_failures(self, code: type[Orders]) -> int:
        failed = rows(flow_of(self.folder, code, self.queue), "failed")
        last = failed.sort("attempt").group_by("message_id").last()
        return last["state"].to_list().count("open")


@pytest.fixture
def ground(tmp_path):
    return Ground(tmp_path)


def expected(*found: dict[str, Any] | None) -> list[dict[str, Any]]:
    return sorted((row for row in found if row), key=str)


@pytest.mark.parametrize("change", CHANGES)
def test_both_versions_store_their_rows_and_the_new_one_retries_and_replays(ground, change):
    before, after, old_payload, new_payload, old_old, old_new, new_old, new_new = CHANGES[change]
    old, new = version(before, is_old=True), version(after, is_old=False)

    ground.handle(old, old_payload, {**old_payload, "unknown": "fail"})
    ground.handle(new, new_payload)
    ground.handle(old, new_payload)  # rolled back, or not yet deployed everywhere
    assert ground.table(new) == expected(old_old, new_new, old_new)

    ground.handle(new, origin="failed")
    assert ground.open_failures(new) == 0
    # The old code may have failed the new payload: the retry stores it.
    assert ground.table(new) == expected(old_old, new_new, old_new or new_new, new_old)

    ground.handle(new, origin="messages")
    assert ground.table(new) == expected(new_old, new_old, new_new, new_new)


@pytest.mark.parametrize("change", CHANGES)
def test_runs_of_both_versions_at_once_store_their_rows(ground, change):
    before, after, old_payload, new_payload, old_old, _, _, new_new = CHANGES[change]
    flows = [flow_of(ground.folder, version(before, is_old=True), ground.queue)]
    flows += [flow_of(ground.folder, version(after, is_old=False), ground.queue)]
    receives = []
    for flow, payload in zip(flows, (old_payload, new_payload), strict=True):
        ground.queue.enqueue([json.dumps(payload).encode()])
        receives.append(worked(flow, demand=1))

    for flow, receive in reversed([*zip(flows, receives, strict=True)]):
        finish(flow, receive)

    assert ground.table(version(after, is_old=False)) == expected(old_old, new_new)
    assert ground.queue.backlog().messages == 0


class Priced(Plain):
    total: int


class PricedExactly(Plain):
    total: float


@pytest.mark.parametrize(("before", "after"), [(Priced, PricedExactly), (PricedExactly, Priced)])
def test_a_widened_or_narrowed_field_is_refused_before_messages_are_leased(ground, before, after):
    ground.handle(version(before, is_old=True), {"number": 1, "total": 1})

    with pytest.raises(SchemaChangeError):
        ground.handle(version(after, is_old=False), {"number": 2, "total": 2})

    assert ground.queue.backlog().messages == 1
    ground.handle(version(before, is_old=True))
    assert ground.queue.backlog().messages == 0


def test_a_renamed_batcher_gets_new_rows_retried_rows_and_replayed_rows(ground):
    old, new = version(Noted, is_old=True), version(Noted, is_old=False, batcher="lake_2")

    ground.handle(old, NOTED, {**NOTED, "unknown": "fail"})
    ground.handle(new, NOTED)
    ground.handle(old, NOTED)
    ground.handle(new, origin="failed")
    assert [len(ground.table(code, name)) for code, name in ((old, "lake"), (new, "lake_2"))] == [2, 2]

    ground.handle(new, origin="messages")
    assert [len(ground.table(code, name)) for code, name in ((old, "lake"), (new, "lake_2"))] == [0, 4]


def test_a_batcher_can_be_added_and_removed(ground):
    before, after = version(Noted, is_old=True), version(Noted, is_old=False)
    after.batchers = {"lake": TableBatcher(schema=Noted), "archive": TableBatcher(schema=Noted)}
    after.handle_message = lambda _, message, __: message.put(message.json(Noted), batcher="archive")

    ground.handle(before, NOTED)
    ground.handle(after, NOTED)
    ground.handle(before, NOTED)  # the batcher is removed again
    assert [len(ground.table(after, name)) for name in ("lake", "archive")] == [2, 1]

    ground.handle(before, origin="messages")
    assert [len(ground.table(after, name)) for name in ("lake", "archive")] == [3, 0]


def test_another_source_continues_the_tables_and_failures_of_the_old_one_are_retried(ground):
    code, payload = version(Noted, is_old=False), {**NOTED, "unknown": "fail"}
    ground.handle(version(Noted, is_old=True), NOTED, payload)

    ground.queue = TableQueue(name="orders_topic", url=f"sqlite:///{ground.folder}/other.sqlite")
    ground.queue.create()
    ground.handle(code, NOTED, payload)
    assert len(ground.table(code)) == 3, "a message of another source is another message"
    ground.handle(code, origin="failed")

    assert ground.open_failures(code) == 0
    stored = rows(flow_of(ground.folder, code, ground.queue), "lake")
    assert sorted(stored["source"]) == ["orders_topic", "orders_topic", "queue", "queue"]


class Keyed(Orders):
    """Batches orders by a key that the new code computes in another way."""

    batchers: ClassVar = {"lake": TableBatcher(schema=Noted, batch_size=10)}

    def handle_message(self, message: Message, context: Any) -> Message:
        order = message.json(Noted)
        return message.put(order, batcher="lake", batch_key=order.note if self.is_old else str(order.number))


def test_another_batch_key_changes_no_rows(ground):
    old, new = (type("Orders", (Keyed,), {"is_old": is_old}) for is_old in (True, False))
    ground.handle(old, NOTED)
    ground.handle(new, NOTED)
    ground.handle(old, NOTED)
    ground.handle(new, origin="messages")
    assert ground.table(new) == [{"note": "n"}] * 3


@pytest.mark.faults
def test_spark_reads_the_rows_of_both_versions_from_delta_and_iceberg(
    ground, servers_folder, tmp_path, tmp_path_factory
):
    ready(spark_jvm)
    before, after, old_payload, new_payload, old_old, _, _, new_new = CHANGES["fields"]
    ground.handle(version(before, is_old=True), old_payload)
    ground.handle(version(after, is_old=False), new_payload)
    flat, new = Ground(tmp_path_factory.mktemp("flat")), iceberg(tmp_path)[0]
    with closing(new()) as sink:
        flat.sinks = {"lake": sink}
        flat.handle(version(Plain, is_old=True), {"number": 1})
        flat.handle(version(Noted, is_old=False), NOTED)
        metadata = iceberg_table(sink, "orders", "lake").metadata_location
    tables = ["delta", f"{tmp_path}/lake/orders/lake", "iceberg", metadata]

    read = spark_jvm.command(servers_folder, Path(fixtures.__file__).with_name("ReadTables.java"), *tables)
    read_by_spark = subprocess.run(read, capture_output=True, text=True, check=False)

    assert read_by_spark.returncode == 0, read_by_spark.stderr[-4_000:]
    said = read_by_spark.stdout
    for number, rows_ in enumerate(((old_old, new_new), ({}, {"note": "n"}))):
        found = [json.loads(line.split(" ", 2)[2]) for line in said.splitlines() if line.startswith(f"row {number} ")]
        assert sorted(map(_without_nulls, found), key=str) == sorted(map(_without_nulls, rows_), key=str)


def _without_nulls(value: Any) -> Any:
    """Return a value without nulls, which Spark's JSON leaves out."""
    if isinstance(value, dict):
        left_out = [*SYSTEM.names, "number"]
        return {name: _without_nulls(each) for name, each in value.items() if each is not None and name not in left_out}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
