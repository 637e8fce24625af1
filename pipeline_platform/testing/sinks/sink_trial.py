"""Trial of one promise of a sink with a new store: publications, other processes and expectations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import pyarrow as pa

from pipeline_platform.lake.tables import SYSTEM
from pipeline_platform.sinks.contract import Publication, Sink
from pipeline_platform.testing import promises
from pipeline_platform.testing.promises import Check, Promise
from pipeline_platform.testing.sinks.sink_publisher import NEVER, Interrupted, Publishers, no_rows

T = TypeVar("T")

SINK_PROMISES: dict[str, Promise] = {}
"""All promises of sinks, by name."""

PIPELINE, TABLE = "checked", "numbers"
FIRST, SECOND = "2026-01-01-00:00", "2026-01-01-01:00"
"""Windows of the publications."""
COLUMNS = pa.schema([("number", pa.int64()), ("text", pa.string()), *SYSTEM])
"""Columns of the checked tables. `number` differs between the rows that a table contains at the same time."""
PER_BATCH = 500
"""Rows of a batch."""


@dataclass(frozen=True)
class Store:
    """Properties of a store that `check_sink` cannot detect. All but `read` are optional.

    Attributes:
        read: Function of a sink, a pipeline and a table that returns the stored rows, as dicts by column.
        away: Function that returns a sink with an address at which no server answers.
        forget: Function of a sink, a pipeline and a table that removes the ids of published receives, as if they were
            older than the sink keeps them.
        losing: Function of a sink that returns a context, in which the store executes all statements, but the first
            answer to a commit is lost.
    """

    read: Callable[[Any, str, str], Iterable[Mapping[str, Any]]]
    away: Callable[[Any], Sink] | None = None
    forget: Callable[[Any, str, str], object] | None = None
    losing: Callable[[Any], AbstractContextManager[object]] | None = None


def promise(*builds_on: str) -> Callable[[Check], Check]:
    """Register a function as the check of a promise; the first line of its docstring is the promise's sentence."""

    def register(check: Check) -> Check:
        SINK_PROMISES[check.__name__] = Promise.of(check, Sink, builds_on)
        return check

    return register


class SinkTrial(promises.Trial):
    """A new store, and a sink of it."""

    def __init__(self, promise: Promise, build: Callable[[], Sink], store: Store) -> None:
        self.sink, self.store = build(), store
        self._others = list[Sink]()
        self._publishers: Publishers | None = None
        super().__init__(promise, self.sink)

    def close(self) -> None:
        """Close all sinks."""
        for opened in (self.sink, *self._others, self._publishers):
            if opened is not None:
                opened.close()

    def another(self) -> Sink:
        """Return a sink with the same options, as in another process."""
        self._others.append(type(self.sink)(**self.options))
        return self._others[-1]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the sink."""
        return {name: getattr(self.sink, name) for name in self.sink.model_fields_set}

    def ensure(self, columns: pa.Schema = COLUMNS, *tables: str) -> None:
        """Create tables, as a run does before it leases messages."""
        for table in tables or (TABLE,):
            self.sink.ensure(PIPELINE, table, columns)

    def publication(self, receive_id: str, *numbers: int, window: str = FIRST, **fields: Any) -> Publication:
        """Return a publication of a row per number, in batches of a few hundred rows."""
        columns: pa.Schema = fields.get("columns", COLUMNS)
        values = {"receive_id": receive_id, "window": window, "source": "queue", "attempt": 1}
        rows = [{**values, "number": n, "text": f"text {n}", "message_id": str(n), "note": str(n)} for n in numbers]
        parts = [rows[start : start + PER_BATCH] for start in range(0, len(rows), PER_BATCH)]
        batches = [pa.RecordBatch.from_pylist(part, schema=columns) for part in parts]
        made = Publication(
            receive_id=receive_id,
            pipeline=PIPELINE,
            table=TABLE,
            columns=columns,
            started_at=datetime.now(UTC),
            windows=(window,),
            replaces=(),
            rows=lambda: iter(batches),
        )
        return replace(made, **fields)

    def publish(self, receive_id: str, *numbers: int, **fields: Any) -> bool:
        """Store a row per number."""
        return self.sink.publish(self.publication(receive_id, *numbers, **fields))

    def rows(self, table: str = TABLE, pipeline: str = PIPELINE) -> list[dict[str, Any]]:
        """Return the stored rows, ordered by number."""
        found = self.store.read(self.another(), pipeline, table)
        return sorted(map(dict, found), key=lambda row: row["number"])

    def expect_stored(self, wanted: Mapping[str, Iterable[int]], when: str, table: str = TABLE) -> None:
        """Expect the numbers of receives, and no other rows."""
        expected = Counter((receive_id, number) for receive_id, numbers in wanted.items() for number in numbers)
        found = Counter((row["receive_id"], row["number"]) for row in self.rows(table))
        lacking, extra = expected - found, found - expected
        seen = f"{found.total()} rows; missing: {_some(lacking)}; not expected: {_some(extra)}"
        self.expect(found == expected, f"{expected.total()} rows {when}", seen)

    def expect_published(self, receive_id: str, wanted: bool, when: str) -> None:
        """Expect an answer of `is_published`, also of another process."""
        for sink in self.sink, self.another():
            found = sink.is_published(PIPELINE, TABLE, receive_id)
            self.expect(found is wanted, f"{wanted} from is_published() {when}", found)

    @contextmanager
    def interrupted(self, publication: Publication, stop_before: int) -> Iterator[Publishers]:
        """Publish in another process, which stops before a batch of its rows; kill it at the end of the block.

        With `NEVER` it does not stop; its point is the end of the last batch.
        """
        self._publishers = self._publishers or Publishers()
        batches = [*publication.rows()]
        work = Interrupted(type(self.sink), self.options, replace(publication, rows=no_rows), batches, stop_before)
        with self._publishers.publishing(work) as is_there:
            self.expect(is_there or stop_before == NEVER, f"batch {stop_before} to be read", "the publisher ended")
            yield self._publishers


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions in threads at the same time; return their results."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(lambda call: call(), calls))


def _some(rows: Counter[tuple[str, int]]) -> str:
    shown = ", ".join(f"{number} of {receive_id}" for receive_id, number in sorted(rows)[:3])
    return (shown + (" and others" if len(rows) > 3 else "")) or "none"
