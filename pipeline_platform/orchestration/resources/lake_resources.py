"""The lake and the control store as Dagster resources, and tables as arguments of downstream assets."""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa
from pydantic import Field

from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.reader import scan
from pipeline_platform.lake.storage import Lake
from pipeline_platform.orchestration.resources.addresses import QUIET
from pipeline_platform.orchestration.resources.spark_resource import SparkResource

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

IO_MANAGER = "lake_io_manager"
"""The key by which Dagster finds who reads a pipeline's tables for assets downstream of it."""

WINDOW = "window"
"""The column that tables are partitioned by."""


class LakeResource(dg.ConfigurableResource[Lake]):
    """Where all tables lie."""

    model_config = QUIET

    root: str = Field(description="A folder, or the URL of an object store: s3://bucket/prefix or gs://bucket/prefix.")
    storage_options: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="For S3, by delta-rs's names: AWS_REGION, AWS_ENDPOINT_URL, ... None for gs://.",
    )

    def create_resource(self, context: dg.InitResourceContext) -> Lake:
        """Hand out the lake."""
        return Lake(root=self.root, storage_options=self.storage_options)


class ControlResource(dg.ConfigurableResource[ControlStore]):
    """The limits, pauses and claims that all runs share."""

    model_config = QUIET

    url: str = Field(
        repr=False,
        description="SQLAlchemy URL: sqlite:///<file> on one machine, postgresql+psycopg://... on several.",
    )

    def create_resource(self, context: dg.InitResourceContext) -> ControlStore:
        """Hand out the control store."""
        return ControlStore(self.url)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[ControlStore]:
        """Lend it, and close its connections afterwards: a sensor asks for one at every look.

        Dagster comes by here however a process of a run ends: where the run ends with it, what it claimed is released.
        """
        with closing(self.create_resource(context)) as store:
            try:
                yield store
            finally:
                if store.run_id:
                    with suppress(ControlStoreError):  # its claims run out all the same
                        store.let_go(store.run_id)


def values_of(resource: dg.ConfigurableResource[Any]) -> dict[str, Any]:
    """The options of a resource, with those that name a variable as it is set; Dagster has no context for it yet."""

    def value(given: Any) -> Any:
        if isinstance(given, dict):
            return {key: value(one) for key, one in given.items()}
        return given.get_value() if isinstance(given, dg.EnvVar) else given

    return {name: value(given) for name, given in resource}


class LakeIOManager(dg.ConfigurableIOManager):
    """Gives a downstream asset the windows of a table, by the type of its argument, and stores what it returns.

    An argument may be a `pyarrow.Table`, a `polars.DataFrame`, a `polars.LazyFrame` or a Spark `DataFrame`. What an
    asset returns, any of these, becomes a Delta table named after the asset; if the asset is partitioned, a run
    replaces its partitions only. Ops of a pipeline hand over nothing through it.
    """

    model_config = QUIET

    lake: dg.ResourceDependency[Lake]
    spark: dg.ResourceDependency[SparkResource]

    def load_input(self, context: dg.InputContext) -> Any:
        """Read the upstream table: the run's windows where both are partitioned, else all of them."""
        import polars as pl
        from deltalake import DeltaTable

        uri = self.lake.uri(*context.asset_key.path)
        table = DeltaTable(uri, storage_options=self.lake.patient_options)
        columns, windows = pa.schema(table.schema()), None
        if context.has_asset_partitions and WINDOW in table.metadata().partition_columns:
            windows = list(context.asset_partition_keys)
        kind = context.dagster_type.typing_type
        if getattr(kind, "__module__", "").startswith("pyspark."):
            return self._spark_frame(uri, table, columns, windows)
        frame = scan(self.lake, table)
        if windows is not None:
            frame = frame.filter(pl.col(WINDOW).is_in(windows))
        if kind is pl.LazyFrame:
            return frame
        # Not `to_pyarrow_table`, which aborts the process at its exit every other time.
        return frame.collect() if kind is pl.DataFrame else frame.collect().to_arrow().cast(columns)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Store a frame as the asset's own table, in place of what it held; of its partitions, if it has any."""
        if obj is None:
            return
        from deltalake import DeltaTable, write_deltalake
        from deltalake.exceptions import TableNotFoundError

        rows, uri = _to_arrow(obj), self.lake.uri(*context.asset_key.path)
        options: dict[str, Any] = {"schema_mode": "overwrite", "storage_options": self.lake.patient_options}
        if context.has_asset_partitions:
            keys = list(context.asset_partition_keys)
            rows = _in_windows(rows, keys, context.asset_key)
            options |= {"schema_mode": "merge", "partition_by": [WINDOW]}
            with suppress(TableNotFoundError):
                DeltaTable(uri, storage_options=options["storage_options"])
                quoted = ", ".join("'" + key.replace("'", "''") + "'" for key in keys)
                options["predicate"] = f"{WINDOW} IN ({quoted})"
        write_deltalake(uri, rows, mode="overwrite", **options)
        context.add_output_metadata({"dagster/row_count": rows.num_rows})

    def _spark_frame(self, uri: str, table: "DeltaTable", columns: pa.Schema, windows: list[str] | None) -> "DataFrame":
        from pyspark.sql.pandas.types import from_arrow_schema

        schema, spark = from_arrow_schema(columns), self.spark.spark_session
        adds = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        chosen = [add["path"] for add in adds if windows is None or add[f"partition.{WINDOW}"] in windows]
        if not chosen:
            return spark.createDataFrame([], schema)
        # Without Delta's own jars: Spark reads the files that the table's log names. S3 has another name in Hadoop.
        folder = re.sub("^s3://", "s3a://", uri)
        # A file's folder says its window, whether a task or a compaction wrote it.
        return spark.read.schema(schema).option("basePath", folder).parquet(*(f"{folder}/{path}" for path in chosen))


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
