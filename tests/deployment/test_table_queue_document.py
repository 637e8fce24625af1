"""What docs/connect/table-queue.md shows is run, on a real PostgreSQL."""

import json
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.handle.handle_messages import Handler
from tests.fixtures.documents import deployed, source_of
from tests.fixtures.postgres import administrator

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "connect" / "table-queue.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)
TABLE, RIGHTS = re.findall(r"```sql\n(.*?)```", DOCUMENT, re.S)


@pytest.fixture
def shown(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the document defines, deployed as it says."""
    monkeypatch.setenv("OUTBOX_URL", postgres_url)
    return deployed(BLOCKS)


@pytest.fixture
def queue(shown: dict[str, Any], postgres_url: str) -> TableQueue:
    """The source of the document, with the table that it is for."""
    made: TableQueue = source_of(shown, "outbox")
    with administrator(postgres_url) as connection:
        connection.execute(TABLE)  # type: ignore[arg-type, unused-ignore]
    made.create()
    return made


def test_the_pipeline_handles_what_its_outbox_gives(
    shown: dict[str, Any], queue: TableQueue, postgres_url: str
) -> None:
    orders: type[Pipeline] = shown["Orders"]
    with psycopg.connect(postgres_url) as connection:
        for number in range(3):
            told = (f"customer {number % 2}", json.dumps({"number": number, "total": 1.5}))
            connection.execute("INSERT INTO sales.outbox (customer, body) VALUES (%s, %s)", told)
        connection.execute("INSERT INTO sales.outbox (customer, body) VALUES ('nobody', '[]')")

    (share,) = queue.plan(10, 1, "r1")
    (batch,) = queue.read(share, "r1")
    messages = Handler(orders(), None).handle(batch)
    assert queue.ack("r1", batch.column("ack_id").to_pylist()) == []

    assert orders.producer.source == queue.name
    assert [message.data.number for message in messages if message.status == "ok"] == [0, 1, 2]
    assert batch.column("partition").to_pylist() == ["customer 0", "customer 1", "customer 0", "nobody"]
    assert [message.data for message in messages if message.failure] == [b"[]"]
    assert queue.backlog().messages == 0


def test_the_rights_that_it_grants_are_enough_for_a_run(queue: TableQueue, postgres_url: str) -> None:
    with administrator(postgres_url) as connection:
        connection.execute("INSERT INTO sales.outbox (customer, body) SELECT 'one', '{}' FROM generate_series(1, 5)")
        connection.execute("CREATE ROLE runs LOGIN PASSWORD 'theirs'")
        try:
            connection.execute(RIGHTS)  # type: ignore[arg-type, unused-ignore]
            url = sa.make_url(queue.url).set(username="runs", password="theirs")
            theirs = queue.model_copy(update={"url": url.render_as_string(hide_password=False)})
            theirs.check_ready()
            theirs.plan(5, 2, "given up")
            theirs.abandon("given up", list)
            assert sum(share.messages for share in theirs.plan(5, 2, "r1")) == 5
            assert theirs.extend("r1", list)
            assert theirs.release("r1", ["5"], 60) == []
            assert theirs.ack("r1", ["1", "2", "3", "4"]) == []
        finally:
            connection.execute("DROP OWNED BY runs")
            connection.execute("DROP ROLE runs")


def test_every_option_of_the_source_is_told() -> None:
    assert {name for name in TableQueue.model_fields.keys() - {"name"} if f"`{name}" not in DOCUMENT} == set()
