"""Downstream assets with one row per key of a batcher's table."""

from collections.abc import Sequence
from typing import Any

import dagster as dg
import pyarrow as pa

from pipeline_platform.lake.latest.latest import Latest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import columns_of
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import NAME, PipelineError, Requirement, did_you_mean, shown
from pipeline_platform.orchestration.asset_metadata import metadata_of
from pipeline_platform.orchestration.asset_windows import WHEN_NEW
from pipeline_platform.orchestration.failing import failing_with_reason
from pipeline_platform.orchestration.resources.lake_resources import IO_MANAGER

_WHEN_FAILED = (
    dg.AutomationCondition.execution_failed()
    & dg.AutomationCondition.cron_tick_passed("*/10 * * * *")
    & ~dg.AutomationCondition.in_progress()
).with_label("when_failed")
_WHEN_NEW_OR_FAILED = WHEN_NEW | _WHEN_FAILED


def latest_of(
    pipeline: type[Pipeline],
    batcher: str,
    *,
    key: str | Sequence[str],
    order: str | Sequence[str],
    deleted: str | None = None,
    name: str | None = None,
    automation_condition: dg.AutomationCondition[Any] | None = _WHEN_NEW_OR_FAILED,
) -> dg.AssetsDefinition:
    """Build an asset with one row per key of a batcher's table: the row with the greatest `order`.

    The asset `<pipeline>/<batcher>_latest` merges the rows that were stored since its last materialisation into a Delta
    table. It may be materialised at any time and any number of times. Add it to `assets` of `platform_definitions`.

    Args:
        pipeline: The class.
        batcher: Name of the batcher.
        key: Column that identifies a row, or several.
        order: Column whose greatest value is the newest, or several in order of importance. If they are equal, source,
            id and child of the message decide.
        deleted: Boolean column. If it is true in the newest row of a key, the table has no row of the key, and no older
            row brings it back. The table does not have this column.
        name: Name of the asset and its table, in place of `<batcher>_latest`.
        automation_condition: When Dagster materialises it; None for never. By default `WHEN_NEW`, and after a failed
            run every ten minutes.

    Raises:
        PipelineError: An option is not valid. The message contains the option, its value and the fix.
    """
    latest = _checked(pipeline, batcher, key, order, deleted, name)
    if not isinstance(automation_condition, dg.AutomationCondition | None):
        requirement = Requirement("a dg.AutomationCondition or None", "Use, for example, WHEN_NEW.")
        _refuse("automation_condition", requirement.error(automation_condition))
    metadata = metadata_of(pipeline, batcher)
    columns = [column for column in metadata["dagster/column_schema"].columns if column.name != deleted]

    @dg.asset(
        key=[pipeline.name, latest.name],
        deps=[dg.AssetKey([pipeline.name, batcher])],
        io_manager_key=IO_MANAGER,  # by which assets downstream read it
        required_resource_keys={"lake"},
        automation_condition=automation_condition,
        group_name=pipeline.name,
        owners=list(pipeline.owners),
        kinds={"deltalake"},
        description=f"Newest row of each {', '.join(latest.key)} in `{pipeline.name}/{batcher}`, by "
        f"{', '.join(latest.order)}." + (f" A row with `{deleted}` removes its key." if deleted else ""),
        metadata={
            **metadata,
            "dagster/table_name": f"{pipeline.name}.{latest.name}",
            "dagster/column_schema": dg.TableSchema(columns),
        },
    )
    def merged(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        lake: Lake = context.resources.lake
        with failing_with_reason():
            result = latest.merge(lake)
        figures: dict[str, Any] = {
            "rows read": result.read,
            **{f"rows {name}": result.changes[name] for name in ("inserted", "updated", "deleted")},
            "dagster/row_count": result.rows,
            "dagster/uri": lake.uri(pipeline.name, latest.name),
        }
        return dg.MaterializeResult(metadata=figures, data_version=dg.DataVersion(str(result.version)))

    return merged


def _checked(pipeline: Any, batcher: Any, key: Any, order: Any, deleted: Any, name: Any) -> Latest:
    if not (isinstance(pipeline, type) and issubclass(pipeline, Pipeline) and hasattr(pipeline, "name")):
        requirement = Requirement("the class of a pipeline", "Use latest_of(Orders, 'lake', key=..., order=...).")
        _refuse("pipeline", requirement.error(pipeline))
    if not isinstance(batcher, str) or batcher not in pipeline.batchers:
        hint = did_you_mean(str(batcher), pipeline.batchers, "batchers")
        _refuse("batcher", f"{pipeline.__qualname__} has no batcher {shown(batcher)}. {hint}")
    if batcher not in pipeline.batchers_with_tables():
        _refuse("batcher", f"must be a batcher with a table, got {batcher!r}. Remove table=False from its options.")
    columns = columns_of(pipeline, batcher)
    keys, orders = _columns("key", key, columns), _columns("order", order, columns)
    if both := [column for column in orders if column in keys]:
        _refuse(
            "order", f"must not contain a column of key, got {both[0]!r}. Remove it: it is equal in the rows of a key."
        )
    if deleted is not None:
        _check_column("deleted", deleted, columns)
        if not pa.types.is_boolean(of := columns.field(deleted).type):
            _refuse(
                "deleted", f"must be a boolean column, got {deleted!r} ({of}). Add a field of type bool to the model."
            )
        if deleted in (*keys, *orders):
            _refuse("deleted", f"must not be a column of key or order, got {deleted!r}. Remove it there.")
    taken = ("messages", "outcomes", "failed", *pipeline.batchers)
    name = f"{batcher}_latest" if name is None else name
    if not NAME.is_valid(name) or name in taken:
        requirement = Requirement(
            f"{NAME.must_be}, and not {', '.join(taken)}", "Change it: a table is named after it."
        )
        _refuse("name", requirement.error(name))
    return Latest(pipeline, batcher, name, keys, orders, deleted)


def _columns(option: str, value: Any, columns: pa.Schema) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if not names or any(not isinstance(name, str) or names.count(name) > 1 for name in names):
        requirement = Requirement("a column, or a list of different columns", f"Use, for example, {option}='number'.")
        _refuse(option, requirement.error(value))
    for name in names:
        _check_column(option, name, columns)
        of = columns.field(name).type
        if pa.types.is_nested(of) or (option == "key" and pa.types.is_floating(of)):
            kinds = "text, bytes, whole numbers, decimals, times or booleans"
            _refuse(option, f"must be columns of {kinds}, got {name!r} ({of}). Use another column.")
    return names


def _check_column(option: str, name: Any, columns: pa.Schema) -> None:
    if name not in columns.names:
        hint = did_you_mean(str(name), columns.names, "columns")
        _refuse(option, f"must be a column of the table, got {shown(name)}. {hint}")


def _refuse(option: str, why: str) -> Any:
    raise PipelineError(f"latest_of.{option}: {why}")
