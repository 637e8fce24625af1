"""Metadata of a pipeline's assets for Dagster's catalog: columns, table name and code reference."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa

from pipeline_platform.lake.tables import columns_of
from pipeline_platform.model.columns.casts import JsonText
from pipeline_platform.model.columns.fields import fields
from pipeline_platform.model.columns.schema import row_type
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.resources.lake_resources import NO_TABLE

_COLUMNS: Mapping[str, str | None] = {
    "at": "time of the event",
    "state": "open, dead or closed; the event with the highest attempt counts",
    "stage": "callback or step that failed",
    "kind": "class of the exception, or kind of the failure such as timeout",
    "reason": "text of the failure",
    "traceback": "traceback of the exception, or null",
    "due_at": "time of the automatic retry, or null",
    "own_partition": "partition by partition_by, if the pipeline holds partitions",
    "outcome": "handled, skipped, failed, returned, duplicate or erased",
    "action": "action at the source, such as ack or nack:30",
    "batcher": "batcher of the message",
    "batch_key": "key of the batch",
    "batch_id": "UUID of the batch",
    "child": "number of the row, if handle_message returned a list",
    "received_at": "time at which the run received it",
    "receive_id": "receive that wrote the row",
    "window": "partition of the assets: start of the window in UTC",
}
"""Descriptions of the platform's columns that are not columns of a delivery."""


def metadata_of(pipeline: type[Pipeline], table: str) -> dict[str, Any]:
    """Return the metadata of the asset of a table."""
    if table in pipeline.batchers and table not in pipeline.batchers_with_tables():
        reason = f"{pipeline.__qualname__}.batchers[{table!r}].table is False"
        return {NO_TABLE: reason, **_code_references(pipeline)}
    return {
        "dagster/storage_kind": "delta",
        "dagster/table_name": f"{pipeline.name}.{table}",
        "dagster/column_schema": _columns(pipeline, table),
        **_code_references(pipeline),
    }


def _columns(pipeline: type[Pipeline], table: str) -> dg.TableSchema:
    model = pipeline.batchers[table].table_schema if table in pipeline.batchers else None
    of_model = {name: field.description for name, field in fields(model).items()} if model else {}
    if model is None and table in pipeline.batchers:
        of_model = {"data": "data of the message, as JSON"}
    descriptions: Mapping[str, str | None] = {
        **_COLUMNS,
        **{field.name: text for field in MESSAGES if (text := _doc(field))},
        **of_model,
    }
    json = {name for name, cast in row_type(model).casts.items() if isinstance(cast, JsonText)} if model else set()
    return dg.TableSchema(
        [
            dg.TableColumn(col.name, "JSON text" if col.name in json else str(col.type), descriptions.get(col.name))
            for col in columns_of(pipeline, table)
        ]
    )


def _doc(field: pa.Field) -> str | None:
    text = (field.metadata or {}).get(b"doc")
    return text.decode() if text else None


def _code_references(pipeline: type[Pipeline]) -> dict[str, Any]:
    """Return the location of the class; empty for a class without a source file."""
    try:
        file, line = inspect.getsourcefile(pipeline), inspect.getsourcelines(pipeline)[1]
    except (OSError, TypeError):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        reference = dg.LocalFileCodeReference(file_path=str(file), line_number=line)
        return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[reference])}
