"""Old and new code of a pipeline in turns: rolling deployment, roll-back, retry and replay after a change."""

import enum
import json
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.schema_changes import SchemaChangeError
from pipeline_platform.lake.tables import SYSTEM
from tests.fixtures.flow import flow_of, rows, run

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
            raise ValueError("told to")
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
        self.folder, self.sent = folder, 0
        self.queue = TableQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite")
        self.queue.create()

    def handle(self, code: type[Orders], *payloads: dict[str, Any], **asked: Any) -> None:
        self.queue.enqueue(json.dumps(payload).encode() for payload in payloads)
        run(flow_of(self.folder, code, self.queue), **asked)

    def table(self, code: type[Orders], batcher: str = "lake") -> list[dict[str, Any]]:
        stored = rows(flow_of(self.folder, code, self.queue), batcher).drop([*SYSTEM.names, "number"], strict=False)
        return sorted(stored.to_dicts(), key=str)

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
