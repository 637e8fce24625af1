"""Decimal columns whose digits differ from the model's: a table keeps the digits that it was created with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema


def as_stored(columns: pa.Schema, handle: DeltaTable) -> Schema:
    """Return the columns of a model as a Delta schema, with the Decimal digits of the stored table."""
    from deltalake import Schema

    return Schema.from_arrow(keep_decimals(columns, handle))


def keep_decimals(columns: pa.Schema, handle: DeltaTable) -> pa.Schema:
    """Return the columns of a model, with the Decimal digits of the stored table."""
    if "decimal" not in str(columns):
        return columns
    there = pa.struct(list(pa.schema(handle.schema().to_arrow())))
    return pa.schema(list(_kept(pa.struct(list(columns)), there)))


def _kept(ours: pa.DataType, there: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal(ours) and pa.types.is_decimal(there):
        return there
    if pa.types.is_struct(ours) and pa.types.is_struct(there):
        known = {field.name: field.type for field in there}
        return pa.struct([field.with_type(_kept(field.type, known.get(field.name, field.type))) for field in ours])
    if pa.types.is_list(ours) and pa.types.is_list(there):
        return pa.list_(_kept(ours.value_type, there.value_type))
    if pa.types.is_map(ours) and pa.types.is_map(there):
        return pa.map_(ours.key_type, _kept(ours.item_type, there.item_type))
    return ours
