"""What the catalog shows of a pipeline's tables before they hold anything: columns, name, and where the class is."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa

from pipeline_platform.lake.tables import columns_of
from pipeline_platform.model.fields import fields
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.model.pipeline import Pipeline


def metadata_of(pipeline: type[Pipeline], table: str) -> dict[str, Any]:
    """The metadata of the asset of one of a pipeline's tables."""
    return {
        "dagster/storage_kind": "delta",
        "dagster/table_name": f"{pipeline.name}.{table}",
        "dagster/column_schema": _columns(pipeline, table),
        **_code_references(pipeline),
    }


def _columns(pipeline: type[Pipeline], table: str) -> dg.TableSchema:
    model = pipeline.batchers[table].table_schema if table in pipeline.batchers else None
    of_model = {name: getattr(one.of, "description", None) for name, one in fields(model).items()} if model else {}
    said: Mapping[str, str | None] = {**{one.name: _doc(one) for one in MESSAGES}, **of_model}
    columns = columns_of(pipeline, table)
    return dg.TableSchema([dg.TableColumn(one.name, str(one.type), said.get(one.name)) for one in columns])


def _doc(field: pa.Field) -> str | None:
    text = (field.metadata or {}).get(b"doc")
    return text.decode() if text else None


def _code_references(pipeline: type[Pipeline]) -> dict[str, Any]:
    """Where the class is; nowhere for one that is typed in."""
    try:
        file, line = inspect.getsourcefile(pipeline), inspect.getsourcelines(pipeline)[1]
    except (OSError, TypeError):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        reference = dg.LocalFileCodeReference(file_path=str(file), line_number=line)
        return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[reference])}
