"""Rows in a database of yours, one for each message: source, message id and child are its key.

Callbacks run at least once. After a crash, `handle_batch` may get the same batch again, with the same `batch_id`. A
retry and a replay make new batches of the same messages, with other ids. So the key is that of the message, and an
upsert writes its newest values.
"""

from typing import Any

import sqlalchemy as sa
from pydantic import BaseModel

from pipeline_platform import Batcher, Pipeline, Producer
from pipeline_platform.testing import test_batch


class Payment(BaseModel):
    number: int
    amount: float


class Place(BaseModel):
    # Or postgresql+psycopg://user@host/payments. Its password is a secret: leave it to PGPASSFILE.
    database: str = "sqlite:///payments.sqlite"


CREATE = """CREATE TABLE IF NOT EXISTS payments (
    source TEXT, message_id TEXT, child INTEGER, number INTEGER, amount REAL,
    PRIMARY KEY (source, message_id, child))"""

UPSERT = """INSERT INTO payments VALUES (:source, :message_id, :child, :number, :amount)
    ON CONFLICT (source, message_id, child) DO UPDATE SET number = excluded.number, amount = excluded.amount"""


class Payments(Pipeline):
    """Payments to a database, a hundred in a transaction."""

    name = "payments"
    producer = Producer(source="payments_queue")
    batchers = {"booked": Batcher(schema=Payment, batch_size=100)}
    context = Place()

    def handle_message(self, message, context):
        return message.put(message.json(Payment), batcher="booked")

    def handle_batch(self, batcher, messages, batch_info, context):
        engine = sa.create_engine(context.database, poolclass=sa.NullPool)
        with engine.begin() as transaction:
            transaction.execute(sa.text(CREATE))
            transaction.execute(sa.text(UPSERT), [row_of(message) for message in messages])
        return messages


def row_of(message) -> dict[str, Any]:
    child = message.child or 0  # None unless handle_message returns a list
    return {"source": message.source, "message_id": message.message_id, "child": child, **message.data.model_dump()}


def test_a_payment_that_is_handled_again_is_booked_once_with_its_newest_amount(tmp_path):
    place = {"database": f"sqlite:///{tmp_path}/payments.sqlite"}
    payments = [f'{{"number": {number}, "amount": 2.5}}' for number in range(250)]

    test_batch(Payments, payments, context=place)
    test_batch(Payments, [payment.replace("2.5", "3.5") for payment in payments[:50]], context=place)  # another batch

    with sa.create_engine(place["database"]).connect() as database:
        booked = database.execute(sa.text("SELECT count(*), count(DISTINCT number), sum(amount) FROM payments"))
        assert tuple(booked.one()) == (250, 250, 200 * 2.5 + 50 * 3.5)
