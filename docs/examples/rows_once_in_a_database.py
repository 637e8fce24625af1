"""Rows into a database of yours, each batch once: the batch's id is a key there, and stays the same in another try."""

import sqlite3
from contextlib import closing

from pydantic import BaseModel

from pipeline_platform import Batcher, Pipeline, Producer
from pipeline_platform.testing import test_batch


class Payment(BaseModel):
    number: int
    amount: float


class Place(BaseModel):
    database: str = "payments.sqlite"


class Payments(Pipeline):
    """Payments to a database, a hundred in a transaction."""

    name = "payments"
    producer = Producer(source="payments_queue")
    batchers = {"booked": Batcher(schema=Payment, batch_size=100)}
    context = Place()

    def handle_message(self, message, context):
        return message.put(message.json(Payment), batcher="booked")

    def handle_batch(self, batcher, messages, batch_info, context):
        with closing(sqlite3.connect(context.database)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS batches (batch_id TEXT PRIMARY KEY)")
            database.execute("CREATE TABLE IF NOT EXISTS payments (number INTEGER, amount REAL)")
            seen = database.execute("SELECT 1 FROM batches WHERE batch_id = ?", [batch_info.batch_id]).fetchone()
            if not seen:
                database.execute("INSERT INTO batches VALUES (?)", [batch_info.batch_id])
                rows = [(message.data.number, message.data.amount) for message in messages]
                database.executemany("INSERT INTO payments VALUES (?, ?)", rows)
        return messages


def test_a_batch_that_is_tried_again_is_booked_once(tmp_path):
    place = {"database": str(tmp_path / "payments.sqlite")}
    payments = [f'{{"number": {number}, "amount": 2.5}}' for number in range(250)]

    done = test_batch(Payments, payments, context=place)
    again = done.successful[:100]
    Payments().handle_batch("booked", again, done.batches[0], Place(**place))

    with closing(sqlite3.connect(place["database"])) as database:
        assert database.execute("SELECT count(*), sum(amount) FROM payments").fetchone() == (250, 625.0)
