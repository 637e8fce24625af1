"""Lake and control store as Dagster resources, and the IO manager for downstream assets."""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.reader import scan
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.orchestration.resources.addresses import QUIET
from pipeline_platform.orchestration.resources.spark_resource import SparkResource

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

IO_MANAGER = "lake_io_manager"
"""Resource key of the IO manager that reads a pipeline's tables for downstream assets."""

NO_TABLE = "pipeline_platform/no_table"
"""Metadata of an asset without a table: the reason."""

WINDOW = "window"
"""Partition column of the tables."""


class LakeResource(dg.ConfigurableResource[Lake]):
    """Storage of all tables."""

    model_config = QUIET

    root: str = Field(
        description="Folder, or URL of an object store: s3://bucket/prefix, gs://bucket/prefix or "
        "abfss://container@account.dfs.core.windows.net/prefix."
    )
    storage_options: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Options for S3 or Azure, with the names of delta-rs: AWS_REGION, AWS_ENDPOINT_URL, "
        "AZURE_STORAGE_ACCOUNT_NAME, ... Leave empty for gs://.",
    )

    def create_resource(self, context: dg.InitResourceContext) -> Lake:
        """Return the lake."""
        return Lake(root=self.root, storage_options=self.storage_options)


class ControlResource(dg.ConfigurableResource[ControlStore]):
    """Store of the limits, pauses and claims that all runs share."""

    model_config = QUIET

    url: str = Field(
        repr=False,
        description="SQLAlchemy URL: sqlite:///<file> on one machine, postgresql+psycopg://... on several.",
    )

    def create_resource(self, context: dg.InitResourceContext) -> ControlStore:
        """Return the control store."""
        return ControlStore(self.url)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[ControlStore]:
        """Yield the control store, then release the claims of the run that ends and close the connections.

        Sensors open a store at each tick. Dagster calls this even if the process of a run fails.
        """
        with closing(self.create_resource(context)) as store:
            try:
                yield store
            finally:
                if store.run_id:
                    with suppress(ControlStoreError):  # the claims expire anyway
                        store.let_go(store.run_id)


def resource_options(resource: dg.ConfigurableResource[Any]) -> dict[str, Any]:
    """Return the options of a resource, with `dg.EnvVar` replaced by the value of its variable."""

    def value(given: Any) -> Any:
        if isinstance(given, dict):
            return {key: value(item) for key, item in given.items()}
        if isinstance(given, list):
            return [value(item) for item in given]
        return given.get_value() if isinstance(given, dg.EnvVar) else given

    return {name: value(given) for name, given in resource}


class LakeIOManager(dg.ConfigurableIOManager):
    """IO manager that reads windows of tables for downstream assets, and stores their results.

    The type of an asset's argument selects the form: `pyarrow.Table`, `polars.DataFrame`, `polars.LazyFrame` or Spark
    `DataFrame`. A returned frame of any of these types becomes a Delta table named after the asset; if the asset is
    partitioned, a run replaces its own partitions only. Ops of a pipeline do not use it.
    """

    model_config = QUIET

    lake: dg.ResourceDependency[Lake]
    spark: dg.ResourceDependency[SparkResource]

    def load_input(self, context: dg.InputContext) -> Any:
        """Read the upstream table: the run's windows if both assets are partitioned, else all windows.

        Raises:
            PipelineError: The upstream asset is a batcher without a table.
        """
        import polars as pl
        from deltalake import DeltaTable

        upstream = context.upstream_output
        if upstream is not None and (reason := upstream.definition_metadata.get(NO_TABLE)):
            raise PipelineError(
                f"{context.asset_key.to_user_string()}: has no table to read, because {reason}. Depend on it with "
                "deps=[...], read <pipeline>/messages, or set table=True and replay the windows."
            )
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
        # Not `to_pyarrow_table`, which often aborts the process at its exit.
        return frame.collect() if kind is pl.DataFrame else frame.collect().to_arrow().cast(columns)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Replace the asset's table by a frame, or only the run's partitions if the asset is partitioned."""
        if obj is None:
            return
        from deltalake import write_deltalake
        from deltalake.exceptions import CommitFailedError

        rows, uri = _to_arrow(obj), self.lake.uri(*context.asset_key.path)
        options: dict[str, Any] = {"schema_mode": "overwrite", "storage_options": self.lake.patient_options}
        if context.has_asset_partitions:
            keys = list(context.asset_partition_keys)
            rows = _in_windows(rows, keys, context.asset_key)
            quoted = ", ".join("'" + key.replace("'", "''") + "'" for key in keys)
            options |= {"schema_mode": "merge", "partition_by": [WINDOW], "predicate": f"{WINDOW} IN ({quoted})"}
        try:
            write_deltalake(uri, rows, mode="overwrite", **options)
        except CommitFailedError:  # another run has just created the table, or added a column
            write_deltalake(uri, rows, mode="overwrite", **options)
        context.add_output_metadata({"dagster/row_count": rows.num_rows})

    def _spark_frame(self, uri: str, table: "DeltaTable", columns: pa.Schema, windows: list[str] | None) -> "DataFrame":
        from pyspark.sql.pandas.types import from_arrow_schema

        schema, spark = from_arrow_schema(columns), self.spark.spark_session
        adds = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        chosen = [add["path"] for add in adds if windows is None or add[f"partition.{WINDOW}"] in windows]
        if not chosen:
            return spark.createDataFrame([], schema)
        # Without Delta's jars, Spark reads the files that the table's log lists. Hadoop calls S3 `s3a`.
        folder = re.sub("^s3://", "s3a://", uri)
        # The window is in the name of a file's folder, also after a compaction.
        return spark.read.schema(schema).option("basePath", folder).parquet(*(f"{folder}/{path}" for path in chosen))


def _in_windows(rows: pa.Table, keys: Sequence[str], asset: dg.AssetKey) -> pa.Table:
    """Return rows with a column for the partition of each row."""
    if WINDOW in rows.column_names:
        if others := sorted({*map(str, pc.unique(rows[WINDOW]).to_pylist())} - {*keys}):
            raise ValueError(
                f"{asset.to_user_string()}: the column {WINDOW!r} of its frame contains {others[0]!r}, which is not a "
                "partition of the run. Set it to the partition of each row, or remove it if the run has one partition"
            )
        return rows
    if len(keys) != 1:
        raise ValueError(
            f"{asset.to_user_string()}: a run over {len(keys)} partitions returned a frame without the column "
            f"{WINDOW!r}. Add the column with the partition of each row, or run each partition separately "
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
        f"an asset must return a pyarrow.Table, a Polars frame or a Spark DataFrame, got {type(frame).__name__}"
    )
