"""The lake and the control store as Dagster resources, and tables as arguments of downstream assets."""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
from dagster._config.pythonic_config import ConfigurableResourceFactory
from pydantic import Field

from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.storage import Lake
from resources.spark import SparkResource

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

WINDOW = "window"
"""The column that tables are partitioned by."""


class LakeResource(ConfigurableResourceFactory[Lake]):
    """Where all tables lie."""

    root: str = Field(description="A folder, or the URL of an object store such as s3://bucket/prefix.")
    storage_options: dict[str, str] = Field(
        default_factory=dict, description="For an object store, by delta-rs's names; AWS_REGION, AWS_ENDPOINT_URL, ..."
    )

    def create_resource(self, context: dg.InitResourceContext) -> Lake:
        """Hand out the lake."""
        del context
        return Lake(root=self.root, storage_options=self.storage_options)


class ControlResource(ConfigurableResourceFactory[ControlStore]):
    """The limits, pauses and claims that all runs share."""

    url: str = Field(
        description="SQLAlchemy URL: sqlite:///<file> on one machine, postgresql+psycopg://... on several."
    )

    def create_resource(self, context: dg.InitResourceContext) -> ControlStore:
        """Hand out the control store."""
        del context
        return ControlStore(self.url)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[ControlStore]:
        """Lend it, and close its connections afterwards: a sensor asks for one at every look.

        However a run ends, and at whatever moment it is interrupted, it lets go of what it claimed: Dagster comes by
        here all the same.
        """
        with closing(self.create_resource(context)) as store:
            try:
                yield store
            finally:
                if context.run is not None:
                    with suppress(ControlStoreError):  # its claims run out all the same
                        store.let_go(context.run.run_id)


class LakeIOManager(dg.ConfigurableIOManager):
    """Gives a downstream asset the windows of a table, by the type of its argument, and stores what it returns.

    An argument may be a `pyarrow.Table`, a `polars.DataFrame`, a `polars.LazyFrame` or a Spark `DataFrame`. What an
    asset returns, any of these, becomes a Delta table named after the asset; if the asset is partitioned, a run
    replaces its partitions only. Ops of a pipeline hand nothing over through it: what they share lies in the lake
    under their receive.
    """

    lake: dg.ResourceDependency[Lake]
    spark: dg.ResourceDependency[SparkResource]

    def load_input(self, context: dg.InputContext) -> Any:
        """Read the upstream table: the run's windows where both are partitioned, else all of them."""
        uri = self.lake.uri(*context.asset_key.path)
        table = self._table(uri)
        windows = _some(context, table)
        kind = _full_name(context.dagster_type.typing_type)
        if kind.startswith("pyspark."):
            return self._spark_frame(table, uri, windows)
        if kind.startswith("polars."):
            frame = self._lazy(uri, windows)
            return frame if kind.endswith("LazyFrame") else frame.collect()
        return _arrow(table, windows)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Store a frame as the asset's own table, in place of what it held; of its partitions, if it has any."""
        if obj is None:
            return
        from deltalake import write_deltalake

        rows = _to_arrow(obj)
        uri = self.lake.uri(*context.asset_key.path)
        options = self.lake.storage_options or None
        if context.has_asset_partitions:
            keys = list(context.asset_partition_keys)
            rows = _in_windows(rows, keys, context.asset_key)
            write_deltalake(
                uri,
                rows,
                mode="overwrite",
                predicate=_among(keys) if self._exists(uri) else None,
                partition_by=[WINDOW],
                schema_mode="merge",
                storage_options=options,
            )
        else:
            write_deltalake(uri, rows, mode="overwrite", schema_mode="overwrite", storage_options=options)
        context.add_output_metadata({"dagster/row_count": rows.num_rows})

    def _table(self, uri: str) -> "DeltaTable":
        from deltalake import DeltaTable

        return DeltaTable(uri, storage_options=self.lake.storage_options or None)

    def _exists(self, uri: str) -> bool:
        from deltalake import DeltaTable

        return DeltaTable.is_deltatable(uri, storage_options=self.lake.storage_options or None)

    def _lazy(self, uri: str, windows: Sequence[str] | None) -> Any:
        import polars as pl

        frame = pl.scan_delta(uri, storage_options=self.lake.storage_options or None)
        return frame if windows is None else frame.filter(pl.col(WINDOW).is_in(list(windows)))

    def _spark_frame(self, table: "DeltaTable", uri: str, windows: Sequence[str] | None) -> "DataFrame":
        from pyspark.sql.pandas.types import from_arrow_schema

        # Without Delta's own jars: Spark reads the files that the table's log names.
        schema = from_arrow_schema(_columns(table))
        adds = pa.table(table.get_add_actions(flatten=True))
        chosen = adds.to_pylist() if windows is None else adds.filter(_is_in(adds, windows)).to_pylist()
        spark = self.spark.spark_session
        if not chosen:
            return spark.createDataFrame([], schema)
        folder = re.sub("^s3://", "s3a://", uri)  # Hadoop's name for it
        # The window is in the path, whoever wrote the file: a task or a compaction.
        return (
            spark.read.schema(schema).option("basePath", folder).parquet(*(f"{folder}/{add['path']}" for add in chosen))
        )


def _some(context: dg.InputContext, table: "DeltaTable") -> list[str] | None:
    """The windows that an input is about; None for all that there are."""
    if not context.has_asset_partitions or WINDOW not in table.metadata().partition_columns:
        return None
    there = {partition[WINDOW] for partition in table.partitions()}
    wanted = there.intersection(context.asset_partition_keys)
    return None if wanted == there else sorted(wanted)


def _arrow(table: "DeltaTable", windows: Sequence[str] | None) -> pa.Table:
    from deltalake import QueryBuilder

    where = "" if windows is None else f" WHERE {_among(windows)}"
    # Not `to_pyarrow_table`, which aborts the process at its exit every other time.
    found = QueryBuilder().register("rows", table).execute(f"SELECT * FROM rows{where}")  # noqa: S608 - quoted keys
    columns = _columns(table)
    return pa.table(found).select(columns.names).cast(columns)


def _columns(table: "DeltaTable") -> pa.Schema:
    return pa.schema(table.schema())


def _is_in(adds: pa.Table, windows: Sequence[str]) -> pa.Array:
    return pc.is_in(adds[f"partition.{WINDOW}"], pa.array(windows, pa.string()))


def _among(windows: Sequence[str]) -> str:
    quoted = ", ".join("'" + window.replace("'", "''") + "'" for window in windows)
    return f"{WINDOW} IN ({quoted})" if windows else "false"


def _in_windows(rows: pa.Table, keys: Sequence[str], asset: dg.AssetKey) -> pa.Table:
    """Rows with the partition that each belongs to."""
    if WINDOW in rows.column_names:
        return rows
    if len(keys) != 1:
        raise ValueError(
            f"{asset.to_user_string()}: a run over {len(keys)} partitions returned a frame without a column "
            f"{WINDOW!r}: add one that says which partition a row belongs to, or have each run take one partition "
            "(dg.BackfillPolicy.multi_run())"
        )
    return rows.append_column(WINDOW, pa.repeat(keys[0], rows.num_rows))


def _to_arrow(frame: Any) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    if hasattr(frame, "collect_schema") and hasattr(frame, "lazy"):  # Polars, either kind
        return frame.lazy().collect().to_arrow()
    if hasattr(frame, "toArrow"):  # Spark
        return frame.toArrow()
    raise TypeError(
        f"an asset returned {type(frame).__name__}; the lake keeps a pyarrow.Table, a Polars frame or a Spark DataFrame"
    )


def _full_name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"
