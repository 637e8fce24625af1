"""A queue in a SQL table: SQLite as the embedded default, PostgreSQL for several machines."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import repeat
from typing import Any, ClassVar, Final, Literal, Self

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from pydantic import Field, model_validator
from sqlalchemy.dialects import postgresql

from pipeline_platform.connectors.table_queue import queue_reading, queue_tables, queue_writing
from pipeline_platform.connectors.table_queue.leased_table import LeasedTable
from pipeline_platform.connectors.table_queue.queue_tables import CREATE, database_at, open_table, row_id
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.clients import per_process
from pipeline_platform.source.contract import LeasedIds, Refused, Share
from pipeline_platform.source.leased import LeasedSource
from pipeline_platform.source.metadata import with_metadata
from pipeline_platform.source.pauses import poll
from pipeline_platform.sql.database import Database, DatabaseUrl

IDS_PER_TRANSACTION: Final = 100_000
"""Acknowledgements of one transaction: it holds SQLite's write lock for about 0.1 s."""

LOST: Final = "no longer leased by this receive: it was released, or another receive has leased it"

Payload = Literal["bytes", "json"]


class TableQueue(LeasedSource):
    """Messages in a SQL table, leased to one receive at a time, oldest (lowest id) first.

    `create` creates the tables; for an existing table, which it does not change, two small ones beside it.
    Acknowledging deletes a message's row: use an outbox table or a copy. On SQLite `create` also enables write-ahead
    logging, so that readers and the writer do not wait for each other; that requires a local disk.
    """

    reads_again: ClassVar[bool] = True
    dates_by_own_clock: ClassVar[bool] = False

    url: DatabaseUrl = Field(
        repr=False,
        description="SQLAlchemy URL: sqlite:///<path> or postgresql+psycopg://user:password@host/database. "
        "PostgreSQL sessions get time-outs for locks and idle transactions, and the time zone UTC, unless the URL has "
        "options.",
    )
    table: str = Field("messages", min_length=1, description="Table of the messages, optionally as <schema>.<table>.")
    id_column: str = Field(
        "id",
        min_length=1,
        description="Column of unique integers, texts or UUIDs: the identity of messages, so never reuse an id.",
    )
    data_column: str | None = Field("data", description="Column of payloads; None for the whole row as a JSON object.")
    metadata_column: str | None = Field(None, description="Column of metadata as a JSON object.")
    partition_column: str | None = Field(
        None, description="Column that contains a message's partition as text, such as a customer number."
    )
    one_receive_per_partition: bool = Field(
        False,
        description="Whether the messages of a partition are leased to one receive at a time. Requires "
        "partition_column, with an index if the backlog is large.",
    )
    created_column: str | None = Field(
        None,
        description="Column of the time of a message, for `published_at` and the age of the oldest message; UTC if it "
        "has no time zone.",
    )

    @model_validator(mode="after")
    def _has_partitions(self) -> Self:
        if self.one_receive_per_partition and self.partition_column is None:
            raise ValueError("one_receive_per_partition requires partition_column, got None. Set partition_column.")
        return self

    @property
    def places(self) -> frozenset[str]:
        """The table of a database."""
        return frozenset({queue_tables.place_of(self.url, *self._schema_and_name())})

    @classmethod
    def without_partitions(cls, options: Mapping[str, Any]) -> str | None:
        """Return the reason if there is no partition column."""
        return "which has no partition_column: name one" if options["partition_column"] is None else None

    @property
    def leases_partitions(self) -> bool:  # type: ignore[override]
        """The value of `one_receive_per_partition`."""
        return self.one_receive_per_partition

    def create(self, payload: Payload = "bytes") -> None:
        """Create missing tables; on SQLite also the file and its folders.

        Args:
            payload: Type of payloads in a new table: `bytes`, or `json`, which PostgreSQL validates and can query
            (jsonb).

        Raises:
            SourceError: The database is unavailable, or an existing table lacks a column that the options name.
        """
        schema, name = self._schema_and_name()
        database = database_at(self._what, self.url, create=True)
        with database.writing() as connection:
            if not sa.inspect(connection).has_table(name, schema=schema):
                if self.data_column is None:
                    raise database.refusal(
                        f"table {name!r} does not exist, and with data_column None it is not created. Create it, or "
                        "correct table or data_column."
                    )
                self._new_queue(schema, name, payload).create(connection)
        open_table.cache_clear()
        table = self._table()
        table.database.write(table.leases.metadata.create_all)

    def enqueue(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Add all messages in one durable transaction; return their number. It holds SQLite's write lock.

        Args:
            payloads: One per message.
            metadata: One JSON object or None per payload. Requires `metadata_column`, or `partition_column`, whose name
                is the key of the partition.

        Raises:
            SourceError: The table refuses the messages.
            TypeError: A payload is not `bytes`.
            ValueError: The numbers of metadata and payloads differ, or a payload for a text column is not UTF-8.
        """
        table = self._table()
        options = ["data_column"]
        if metadata is not None:
            beside = [option for option in ("metadata_column", "partition_column") if option in table.columns]
            options += beside or ["metadata_column"]
        for option in options:
            if option not in table.columns:
                raise table.database.refusal(f"{option} is None, so send() cannot store its values. Set {option}.")
        columns = [table.columns[option] for option in options]
        rows = queue_writing.rows_of(
            with_metadata(payloads, metadata),
            as_text=not isinstance(columns[0].type, sa.LargeBinary),
            has_metadata="metadata_column" in options,
            partition_column=self.partition_column if "partition_column" in options else None,
        )
        with table.database.writing() as connection:
            return queue_writing.copy_in(connection, table.queue, [column.name for column in columns], rows)

    def labelled(self, labels: Mapping[str, str]) -> Mapping[str, Any] | None:
        """Return labels as the JSON object of `metadata_column`, if it is set."""
        return labels if self.metadata_column else None

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Add messages; see `enqueue`."""
        return self.enqueue(payloads, metadata)

    def backlog(self) -> Backlog:
        """Return the number of waiting messages, and the time of the oldest if `created_column` is set."""
        return self.backlog_up_to(None)

    def backlog_up_to(self, most: int | None) -> Backlog:
        """Return the backlog, counted no further than `most`: counting a million rows takes a tenth of a second."""
        table = self._table()
        with table.database.reading() as connection:
            messages = table.count_waiting(connection, most)
            oldest = table.oldest_waiting(connection) if messages else None
        return Backlog(messages, self._time(oldest), at_least=most is not None and messages >= most)

    def wait(self, seconds: float, taken: int = 0) -> bool:
        """Count repeatedly, on a connection that stays open until `close`; see `Source.wait`."""
        watched = replace(self._table(), database=self._kept)

        def is_waiting() -> bool:
            with watched.database.reading() as connection:
                return watched.count_waiting(connection, taken + 1) > taken

        return poll(is_waiting, seconds, self.poll_pauses)

    @per_process
    def _kept(self) -> Database:
        return database_at(self._what, self.url, create=False, keep=True)

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Lease up to `demand` messages in equal shares: redeliveries first, then the oldest.

        A second plan with the same `receive_id` releases the messages of the first, whose shares become invalid.
        """
        if demand < 1:
            return []
        table = self._table()
        lease = (receive_id, self.lease_s, demand, concurrency)
        return table.database.write(
            lambda connection: table.lease(connection, *lease),
            before=lambda connection: table.end_what_ran_out(connection, receive_id),
        )

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read the messages of a share that the receive still leases: redeliveries first, then by id.

        `redelivered` is exact; a redelivery's metadata contain the number of `deliveries`. A payload that is not binary
        is its text in UTF-8, NULL is empty, and a row is JSON with binary columns as a backslash, x and hexadecimal
        digits.

        Raises:
            SourceError: The receive has ended, or the database is unavailable.
        """
        table = self._table()
        with table.database.reading() as connection:
            if not table.is_live(connection, receive_id):
                raise table.database.refusal(
                    f"receive {receive_id!r} has ended, and its messages may be leased by another. "
                    f"Raise lease_s (now {self.lease_s:g} s)."
                )
            for columns in queue_reading.read(table, connection, share, receive_id):
                yield self._batch(columns, receive_id)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Delete messages that are leased under `ack_ref`, 100,000 per transaction; several tasks may do so at once.

        Missing messages are fine, and so is an expired lease if no other receive has leased the message since.
        """
        return self._each(ack_ids, lambda table, connection, ids: table.acknowledge(connection, ack_ref, ids))

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Release messages that are leased under `ack_ref`; the count of their deliveries stays."""
        return self._each(ack_ids, lambda table, connection, ids: table.give_back(connection, ack_ref, ids, delay_s))

    def extend(self, receive_id: str, held: LeasedIds) -> bool:
        """Renew the lease of a whole receive to `lease_s` from now: a single row, however many messages.

        Returns:
            False if the receive has ended (it expired and another was planned, or it was abandoned), was never planned,
            or has no message left.
        """
        table = self._table()
        return table.database.write(lambda connection: table.renew(connection, receive_id, self.lease_s))

    def abandon(self, receive_id: str, held: LeasedIds) -> None:
        """Release all messages of a receive, in one row. Until another receive leases a message, `ack` still works."""
        table = self._table()
        table.database.write(lambda connection: table.give_back_all(connection, receive_id))

    def held(self) -> list[tuple[str | None, float, int]]:
        """Return the leases: receive, or None for messages with a delay; seconds left; number of messages."""
        table = self._table()
        with table.database.reading() as connection:
            return table.held(connection)

    def location(self, message_id: str) -> str:
        """Return which receive has leased a message, or whether it is waiting or missing."""
        table = self._table()
        try:
            id_ = table.kind(message_id)
        except ValueError:
            return f"not found: {message_id!r} is not a valid id of table {self.table}"
        with table.database.reading() as connection:
            found = table.look_up(connection, id_)
        if found is None:
            return f"not found: table {self.table} has no such row. It was acknowledged, or never enqueued"
        receive_id, seconds = found
        if receive_id is None:
            return f"waiting for its delay, {seconds:.0f} s left" if seconds else "waiting"
        return f"leased by receive {receive_id} for another {seconds:.0f} s"

    def check_ready(self) -> None:
        """Raise `SourceError` if a receive would fail: for the tables, the columns, or the permission to write."""
        table = self._table()
        with table.database.reading() as connection:
            for beside in (table.leases, table.receives):
                if not sa.inspect(connection).has_table(beside.name, schema=beside.schema):
                    raise table.database.refusal(
                        f"table {beside.name!r} for leases does not exist. To create it, {CREATE}."
                    )
            table.count_waiting(connection, most=1)
            self._time(table.oldest_waiting(connection))
        table.database.write(lambda connection: table.end_what_ran_out(connection, ""))

    @property
    def _what(self) -> str:
        return f"source {self.name!r}, table {self.table!r} of"

    def _schema_and_name(self) -> tuple[str | None, str]:
        schema, dot, name = self.table.rpartition(".")
        return (schema, name) if dot else (None, name)

    def _table(self) -> LeasedTable:
        columns = {option: getattr(self, option) for option in type(self).model_fields if option.endswith("_column")}
        apart = self.one_receive_per_partition
        return open_table(self._what, self.url, *self._schema_and_name(), partitions_apart=apart, **columns)

    def _new_queue(self, schema: str | None, name: str, payload: Payload) -> sa.Table:
        kind = sa.Text().with_variant(postgresql.JSONB(), "postgresql") if payload == "json" else sa.LargeBinary()
        columns: list[sa.Column[Any]] = [
            sa.Column(self.id_column, row_id(), sa.Identity(), primary_key=True),
            sa.Column(self.data_column, kind, nullable=False),
        ]
        if self.partition_column:
            columns.append(sa.Column(self.partition_column, sa.Text, index=True))
        if self.metadata_column:
            columns.append(sa.Column(self.metadata_column, sa.Text))
        if self.created_column:
            time_type = sa.DateTime(timezone=True)
            columns.append(sa.Column(self.created_column, time_type, server_default=sa.func.now(), nullable=False))
        # AUTOINCREMENT: otherwise SQLite reuses the id of the last message once it is deleted.
        return sa.Table(name, sa.MetaData(), *columns, schema=schema, sqlite_autoincrement=True)

    def _each(
        self, ack_ids: Sequence[str], act: Callable[[LeasedTable, sa.Connection, list[Any]], list[Any]]
    ) -> list[Refused]:
        """Act on unique ids in the column's type, some per transaction."""
        table, left = self._table(), list[Any]()
        try:
            ids: list[Any] = sorted({int(id_) for id_ in ack_ids}) if table.kind is int else sorted(set(ack_ids))
        except ValueError as error:
            raise table.database.refusal(f"id_column contains integers, but an id is not valid: {error}.") from None
        for start in range(0, len(ids), IDS_PER_TRANSACTION):
            part = ids[start : start + IDS_PER_TRANSACTION]
            left += table.database.write(lambda connection, part=part: act(table, connection, part))  # type: ignore[misc]
        return [Refused(str(id_), LOST, lost=True) for id_ in left]

    def _batch(self, columns: queue_reading.QueueColumns, receive_id: str) -> pa.RecordBatch:
        ids, notes, attempts = columns["id"], columns.get("metadata"), columns.get("attempts")
        sequence = pa.array(ids, pa.int64()) if isinstance(ids[0], int) else None
        id_strings = pa.array(map(str, ids)) if sequence is None else sequence.cast(pa.string())
        metadata: Any = None
        if notes is not None:
            metadata = [self._metadata(*both) for both in zip(notes, attempts or repeat(1), strict=False)]
        elif attempts:
            # Each text is built once: building it per row costs 3 us, as much as reading the row.
            texts = {count: json.dumps({"deliveries": count}) if count > 1 else None for count in set(attempts)}
            metadata = pa.array(map(texts.get, attempts), pa.string())
        return self.deliveries(
            message_id=id_strings,
            data=pc.fill_null(pa.array(columns["data"], pa.binary()), b""),
            ack_ref=receive_id,
            metadata=metadata,
            redelivered=[count > 1 for count in attempts] if attempts else False,
            published_at=list(map(queue_reading.read_time, columns["created"])) if "created" in columns else None,
            partition=list(map(_text, columns["partition"])) if "partition" in columns else None,
            sequence=sequence,
        )

    def _metadata(self, note: Any, deliveries: int) -> dict[str, Any]:
        if isinstance(note, str | bytes):
            try:
                parsed = json.loads(note)
                if len(note) > 500:  # may be nested so deeply that it can be parsed but not written again
                    json.dumps([[parsed]])
                note = parsed
            except (ValueError, RecursionError):  # invalid or deeply nested JSON in one row must not fail the others
                note = note if isinstance(note, str) else note.decode(errors="replace")
        known = note if isinstance(note, dict) else {} if note is None else {self.metadata_column or "metadata": note}
        return {**known, "deliveries": deliveries} if deliveries > 1 else known

    def _time(self, value: Any) -> datetime | None:
        """Return a value of the created column; raise `SourceError` if it is not a time."""
        time = queue_reading.read_time(value)
        if time is None and value is not None:
            raise self._table().database.refusal(
                f"created_column {self.created_column!r} contains {value!r}, which is not a valid time. "
                "Set it to a column of timestamps, ISO 8601 texts or seconds since 1970, or to None."
            )
        return time


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
