"""Tables in an Apache Iceberg catalog. The snapshot with the rows of a receive has its id in the summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cached_property
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from pipeline_platform.model.safe_text import redacted, secrets_in
from pipeline_platform.sinks.contract import Publication, Sink, SinkAwayError, SinkError

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

RECEIVE: Final = "pipeline-platform.receive-id"
"""Property of a snapshot's summary with the id of the receive."""
_PROPERTIES: Final = {
    # Without these, each commit adds a small manifest to the list and a copy of the metadata to the folder, forever.
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    # Exact bounds, not 16 characters: a replay drops the files of a receive without reading them.
    "write.metadata.metrics.column.receive_id": "full",
}
"""Properties of a new table, which may be changed."""
_FILE_BYTES: Final = 2**27
"""Maximum bytes of rows in memory, which become a file per window."""
_CLOCKS: Final = timedelta(hours=1)  # longest difference between the clocks of two hosts


class IcebergSink(Sink):
    """Tables `<pipeline>_<batcher>` in an Iceberg catalog, with the columns of the batchers' tables in the lake."""

    namespace: str = Field(min_length=1, description="Namespace of the tables. Created if it does not exist.")
    catalog: str = Field(
        "default",
        min_length=1,
        description="Name of the catalog. PyIceberg reads its properties from variables such as "
        "PYICEBERG_CATALOG__DEFAULT__URI, and from .pyiceberg.yaml.",
    )
    properties: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Further properties of the catalog and its warehouse, by PyIceberg's names: type, uri, warehouse, "
        "s3.endpoint. Prefer to set credentials in the environment.",
    )

    @model_validator(mode="after")
    def _has_pyiceberg(self) -> Self:
        if find_spec("pyiceberg") is None:
            raise SinkError(f"sink {self.name!r}: pyiceberg is missing. Install pipeline-platform[iceberg]")
        return self

    def ensure(self, pipeline: str, table: str, columns: pa.Schema) -> None:
        """Create a table, or add its new columns."""
        from pyiceberg.exceptions import CommitFailedException, NoSuchNamespaceError, NoSuchTableError

        with self._errors():
            for attempt in count():
                try:
                    with suppress(CommitFailedException):
                        self._widen(self._load(pipeline, table), columns)
                        return
                except (NoSuchTableError, NoSuchNamespaceError):
                    if attempt:  # it was created, or its name is taken
                        why = f"{self.namespace}.{pipeline}_{table} exists, but is not an Iceberg table"
                        raise SinkError(f"sink {self.name!r}: {why}. Drop it, or rename the batcher") from None
                    self._create(pipeline, table, columns)

    def publish(self, publication: Publication) -> bool:
        """Write the rows of a receive to new files, and commit them with its id. A commit succeeds once per version."""
        from pyiceberg.exceptions import CommitFailedException, ValidationException

        files: list[DataFile] | None = None
        tried = ""
        while True:
            with self._errors():
                table = self._load(publication.pipeline, publication.table)
                if table.metadata_location == tried:
                    raise SinkAwayError(f"sink {self.name!r}: {tried} is the newest version, but rejects a commit")
                if _has(table, publication.receive_id):
                    return False
                is_stored = not _goes_back_to(table, publication.started_at) and _has_rows(table, publication)
            if files is None:
                files = [] if is_stored else [*self._written(table, publication)]
            tried = table.metadata_location
            with self._errors(), suppress(CommitFailedException, ValidationException):
                _commit(table, publication, files, replaces=() if is_stored else publication.replaces)
                return not is_stored

    def is_published(self, pipeline: str, table: str, receive_id: str) -> bool:
        """Whether a snapshot has the id of a receive."""
        with self._errors():
            return _has(self._load(pipeline, table), receive_id)

    def close(self) -> None:
        """Close the connections of this process."""
        if catalog := self.__dict__.pop("_catalog", None):
            catalog.close()

    @cached_property
    def _catalog(self) -> Catalog:
        from pyiceberg.catalog import load_catalog

        return load_catalog(self.catalog, **self.properties)

    def _load(self, pipeline: str, table: str) -> Table:
        """Return a table at its newest version. A commit with it fails if another commit came first."""
        loaded = self._catalog.load_table(f"{self.namespace}.{pipeline}_{table}")
        # PyIceberg would commit the same rows again on top of another commit, which may have stored them.
        loaded.metadata.properties["commit.retry.num-retries"] = "0"
        return loaded

    def _create(self, pipeline: str, table: str, columns: pa.Schema) -> None:
        from pyiceberg.exceptions import CommitFailedException, NamespaceAlreadyExistsError, TableAlreadyExistsError
        from sqlalchemy.exc import IntegrityError

        with suppress(NamespaceAlreadyExistsError, IntegrityError):  # another run may create them at the same time
            if not self._catalog.namespace_exists(self.namespace):
                self._catalog.create_namespace(self.namespace)
        name = f"{self.namespace}.{pipeline}_{table}"
        with suppress(TableAlreadyExistsError, CommitFailedException):
            created = self._catalog.create_table_transaction(name, columns, properties=_PROPERTIES)
            with created, created.update_spec() as spec:
                spec.add_identity("window")

    def _widen(self, table: Table, columns: pa.Schema) -> None:
        """Add the columns that a table lacks. Refuse other types and partitions."""
        name, known = ".".join(table.name()), {field.name: field.field_type for field in table.schema().fields}
        if [(str(field.transform), field.name) for field in table.spec().fields] != [("identity", "window")]:
            raise SinkError(
                f"sink {self.name!r}: {name} must be partitioned by window, got {table.spec()}. Restore the partitions"
            )
        for field in columns:
            if field.name in known and (needed := _type_in(table, field)) != known[field.name]:
                raise SinkError(
                    f"sink {self.name!r}: column {name}.{field.name} has the type {known[field.name]}, and the batcher "
                    f"needs {needed or field.type}. Change the column, or rename the field"
                )
        if added := [field for field in columns if field.name not in known]:
            with table.update_schema() as schema:
                schema.union_by_name(pa.schema(added))

    def _written(self, table: Table, publication: Publication) -> Iterator[DataFile]:
        """Write the rows of a publication to files that no reader sees yet."""
        from pyiceberg.io.pyarrow import pyarrow_to_schema, write_file
        from pyiceberg.partitioning import PartitionFieldValue, PartitionKey
        from pyiceberg.table import WriteTask

        schema = pyarrow_to_schema(publication.columns, table.schema().name_mapping)
        (field,), write_id, numbers = table.spec().fields, uuid4(), count()
        for window, rows in _by_window(publication):
            key = PartitionKey([PartitionFieldValue(field, window)], table.spec(), table.schema())
            task = WriteTask(write_id, next(numbers), schema, rows, partition_key=key)
            with self._errors():
                yield from write_file(table.io, table.metadata, iter([task]))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate errors of PyIceberg, of the catalog and of the warehouse."""
        from pyiceberg.exceptions import CommitFailedException, ValidationException

        try:
            yield
        except (SinkError, CommitFailedException, ValidationException):
            raise
        # Without its cause: a client may quote a token or a password.
        except Exception as error:
            secrets = secrets_in({**self.properties, **getattr(self.__dict__.get("_catalog"), "properties", {})})
            reason = redacted(" ".join(f"{type(error).__name__}: {error}".split()), secrets)
            kind = SinkAwayError if _is_temporary(error) else SinkError
            raise kind(f"sink {self.name!r} cannot be used: {reason}. Check its catalog and its properties") from None


def _is_temporary(error: Exception) -> bool:
    """Whether the catalog or the warehouse is unavailable."""
    from botocore.exceptions import BotoCoreError, ClientError
    from pyiceberg import exceptions as rest
    from sqlalchemy.exc import InterfaceError, OperationalError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or "Throttl" in error.response["Error"]["Code"]
    of_rest = rest.CommitStateUnknownException, rest.ServerError, rest.ServiceUnavailableError
    others = OSError, OperationalError, InterfaceError, BotoCoreError, rest.TooManyRequestsError
    return isinstance(error, (*of_rest, *others))


def _has(table: Table, receive_id: str) -> bool:
    return any(snapshot.summary and snapshot.summary[RECEIVE] == receive_id for snapshot in table.metadata.snapshots)


def _goes_back_to(table: Table, time: datetime) -> bool:
    """Whether no snapshot of a table since a time has expired."""
    oldest = min(table.metadata.snapshots, key=lambda snapshot: snapshot.timestamp_ms, default=None)
    return oldest is None or oldest.sequence_number == 1 or oldest.timestamp_ms < (time - _CLOCKS).timestamp() * 1_000


def _has_rows(table: Table, publication: Publication) -> bool:
    wanted = _rows_of([publication.receive_id], publication.windows)
    return bool(table.scan(wanted, selected_fields=("receive_id",), limit=1).to_arrow().num_rows)


def _rows_of(receive_ids: Sequence[str], windows: Sequence[str]) -> Any:
    from pyiceberg import expressions

    among: Any = expressions.In  # mypy's plugin of pydantic misreads its signature
    return expressions.And(among("window", windows), among("receive_id", receive_ids))


def _commit(table: Table, publication: Publication, files: Sequence[DataFile], *, replaces: Sequence[str]) -> None:
    """Add files to a table, and remove the rows of replaced receives, in one commit."""
    with table.transaction() as transaction:
        if replaces:
            transaction.delete(_rows_of(replaces, publication.windows))
        summary = {RECEIVE: publication.receive_id}
        with transaction.update_snapshot(snapshot_properties=summary).merge_append() as append:
            for file in files:
                append.append_data_file(file)


def _by_window(publication: Publication) -> Iterator[tuple[str, list[pa.RecordBatch]]]:
    """Yield rows of one window each, with bounded memory."""
    kept, size = dict[str, list[pa.RecordBatch]](), 0
    for batch in publication.rows():
        for window in batch["window"].unique().to_pylist():
            kept.setdefault(window, []).append(batch.filter(pc.equal(batch["window"], window)))
        size += batch.nbytes
        if size >= _FILE_BYTES:
            yield from kept.items()
            kept, size = {}, 0
    yield from kept.items()


def _type_in(table: Table, field: pa.Field) -> Any:
    """Return the type of a field in a table that has a column of its name; None if a model has another field."""
    from pyiceberg.io.pyarrow import pyarrow_to_schema

    with suppress(ValueError):
        return pyarrow_to_schema(pa.schema([field]), table.schema().name_mapping).fields[0].field_type
