"""The lake and the control store as Dagster resources, and tables as arguments of downstream assets."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from dagster._config.pythonic_config import ConfigurableResourceFactory
from pydantic import Field

from pipeline_platform.control import ControlStore
from pipeline_platform.lake.storage import Lake
from resources.spark import SparkResource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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


class LakeIOManager(dg.ConfigurableIOManager):
    """Gives a downstream asset the windows of a table, by the type of its argument, and stores what it returns.

    An argument may be a `pyarrow.Table`, a `polars.DataFrame`, a `polars.LazyFrame` or a Spark `DataFrame`. What an
    asset returns, a Polars frame or an Arrow table, becomes a Delta table named after the asset. Ops of a pipeline
    hand nothing over through it: what they share lies in the lake under their receive.
    """

    lake: dg.ResourceDependency[Lake]
    spark: dg.ResourceDependency[SparkResource]

    def load_input(self, context: dg.InputContext) -> Any:
        """Read the upstream table's windows: those of the run where both are partitioned, else all."""
        windows = context.asset_partition_keys if context.has_asset_partitions else None
        uri = self.lake.uri(*context.asset_key.path)
        kind = _full_name(context.dagster_type.typing_type)
        if kind.startswith("polars.") and kind.endswith("LazyFrame"):
            return self._lazy(uri, windows)
        if kind.startswith("polars."):
            return self._lazy(uri, windows).collect()
        if kind.startswith("pyspark."):
            return self._spark_frame(uri, windows)
        return self._arrow(uri, windows)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Store a frame as the asset's own table, in place of what it held."""
        if obj is None:
            return
        from deltalake import write_deltalake

        table = obj if isinstance(obj, pa.Table) else obj.to_arrow()
        write_deltalake(
            self.lake.uri(*context.asset_key.path),
            table,
            mode="overwrite",
            schema_mode="overwrite",
            storage_options=self.lake.storage_options or None,
        )
        context.add_output_metadata({"dagster/row_count": table.num_rows})

    def _lazy(self, uri: str, windows: Sequence[str] | None) -> Any:
        import polars as pl

        frame = pl.scan_delta(uri, storage_options=self.lake.storage_options or None)
        return frame if windows is None else frame.filter(pl.col("window").is_in(list(windows)))

    def _arrow(self, uri: str, windows: Sequence[str] | None) -> pa.Table:
        from deltalake import DeltaTable

        table = DeltaTable(uri, storage_options=self.lake.storage_options or None)
        adds = pa.table(table.get_add_actions(flatten=True)).select(["path", "partition.window"]).to_pylist()
        schema = pa.schema([field for field in pa.schema(table.schema()) if field.name != "window"])
        parts = []
        for add in adds:
            if windows is None or add["partition.window"] in windows:
                with self.lake.open_input(f"{uri.removeprefix(self.lake.uri())}/{add['path']}".lstrip("/")) as file:
                    stored = pq.read_table(file)
                for field in schema:
                    if field.name not in stored.column_names:
                        stored = stored.append_column(field, pa.nulls(stored.num_rows, field.type))
                rows = stored.select(schema.names).cast(schema)
                parts.append(rows.append_column("window", pa.repeat(add["partition.window"], rows.num_rows)))
        return pa.concat_tables(parts) if parts else schema.append(pa.field("window", pa.string())).empty_table()

    def _spark_frame(self, uri: str, windows: Sequence[str] | None) -> "DataFrame":
        from deltalake import DeltaTable
        from pyspark.sql.pandas.types import from_arrow_schema

        # Without Delta's own jars: Spark reads the files that the table's log names.
        table = DeltaTable(uri, storage_options=self.lake.storage_options or None)
        schema = from_arrow_schema(pa.schema(table.schema()))
        adds = pa.table(table.get_add_actions(flatten=True)).select(["path", "partition.window"]).to_pylist()
        paths = [f"{uri}/{add['path']}" for add in adds if windows is None or add["partition.window"] in windows]
        spark = self.spark.spark_session
        if not paths:
            return spark.createDataFrame([], schema)
        return spark.read.schema(schema).option("basePath", uri).parquet(*paths)


def _full_name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"
