"""An asset downstream of a pipeline: departure delays per carrier, computed from the table of the batcher `lake`."""

import dagster as dg
import polars as pl

from pipeline_platform.orchestration import IO_MANAGER, WHEN_NEW


@dg.asset(
    key_prefix="flights",
    group_name="flights",
    io_manager_key=IO_MANAGER,
    automation_condition=WHEN_NEW,
    kinds={"polars"},
    owners=["team:flights"],
    ins={"lake": dg.AssetIn(key=["flights", "lake"])},
    description="Departures, cancellations and delays per carrier, over all windows of `flights/lake`.",
)
def delays_per_carrier(context: dg.AssetExecutionContext, lake: pl.LazyFrame) -> pl.DataFrame:
    """Return the number of flights and the delays of each carrier."""
    delays = (
        lake.group_by("carrier")
        .agg(
            pl.len().alias("flights"),
            pl.col("dep_time").is_null().sum().alias("cancelled"),
            pl.col("dep_delay").mean().round(1).alias("mean_delay"),
            pl.col("dep_delay").quantile(0.9).alias("delay_of_a_tenth"),
        )
        .sort("mean_delay", descending=True)
        .collect()
    )
    rows = [f"| {row['carrier']} | {row['flights']} | {row['mean_delay']} |" for row in delays.to_dicts()]
    table = "\n".join(["| carrier | flights | mean delay, minutes |", "|-|-|-|", *rows])
    context.add_output_metadata({"delays": dg.MetadataValue.md(table)})
    return delays
