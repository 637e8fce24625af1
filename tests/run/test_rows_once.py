"""The example that writes rows into a database, in whole runs that fail after its commit, retry and replay."""

from typing import Any

import sqlalchemy as sa

from tests.fixtures.documents import DOCS, imported
from tests.fixtures.flow import rows, run


def test_a_message_has_one_row_whatever_fails_after_the_commit_is_retried_or_replayed(filled, postgres_url, tmp_path):
    database = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    example = imported("rows_once", (DOCS / "examples" / "rows_once_in_a_database.py").read_text(), tmp_path)

    class Place(example.Place):  # type: ignore[name-defined, misc]
        raises: bool = True

    class Unlucky(example.Payments):  # type: ignore[name-defined, misc]
        context = Place()

        def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
            done = super().handle_batch(batcher, messages, batch_info, context)
            if context.raises:
                raise RuntimeError("the connection was lost after the commit")
            return done

    flow = filled(Unlucky, [b'{"number": %d, "amount": 2.5}' % number for number in range(90)])
    unlucky, lucky = ({"database": database, "raises": raises} for raises in (True, False))

    def booked() -> tuple[int, int]:
        with sa.create_engine(database, poolclass=sa.NullPool).connect() as connection:
            found = connection.execute(sa.text("SELECT count(*), count(DISTINCT number) FROM payments")).one()
        return tuple(found)

    batches = set[str]()
    for origin, context in (("source", unlucky), ("failed", unlucky), ("failed", lucky), ("messages", lucky)):
        run(flow, origin=origin, context=context)
        assert booked() == (90, 90)
        batches |= set(rows(flow, "booked")["batch_id"])

    assert rows(flow, "booked").height == 90
    assert len(batches) == 2, "the replay made a new batch"
