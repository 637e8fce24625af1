"""Messages to erase, as an operator chooses them: by values of columns, by a text in their payload, or by ids."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import keys_of
from pipeline_platform.model.message import MESSAGE_KEY, SYSTEM_COLUMNS
from pipeline_platform.model.strict_options import PipelineError

SHORTEST = 3
"""Least characters of a text to search: a shorter text is in most payloads."""
QUOTES = ("reason", "traceback")
"""Columns of `failed` that may quote another message of the same batch."""
_IDS = {*SYSTEM_COLUMNS} - {"batch_key"}
_NOT_SEARCHED = {"failed": {*_IDS, *QUOTES, "first_receive_id", "state", "stage", "kind", "batcher"}}
"""Columns that are not searched, other than `_IDS`. The table of a batcher may have columns of these names."""
_SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Characters with a short escape in JSON."""


@dataclass(frozen=True)
class ErasureChoice:
    """Messages to erase. Only one of `where`, `containing` and `message_ids` is set.

    Attributes:
        where: Values by column of the batchers' tables, as text. A row must have all of them.
        containing: Text in the payload or the metadata of a message, or in a column of its rows.
        message_ids: Ids of messages.
        source: Source of the ids; empty for all sources.
        values: Values of `where` by table and column; only tables with all these columns are searched.
        keys: `keys_of` source and id of messages that may be unknown yet: given by their ids, with a known source.
    """

    where: dict[str, str] = field(default_factory=dict)
    containing: str = ""
    message_ids: tuple[str, ...] = ()
    source: str = ""
    values: dict[str, dict[str, pa.Scalar]] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        columns: Mapping[str, pa.Schema],
        sources: Sequence[str],
        *,
        where: Sequence[str] = (),
        containing: str | None = None,
        message_ids: Sequence[str] = (),
        source: str | None = None,
        reason: str = "",
    ) -> Self:
        """Check the options of the command.

        Args:
            columns: Columns of the batchers' tables, by table.
            sources: Names of the pipeline's sources.
            where: Texts `COLUMN=VALUE`.
            containing: Text to search.
            message_ids: Ids of messages.
            source: Source of the ids.
            reason: Reason for the history, which must not contain what is erased.

        Raises:
            PipelineError: An option is invalid, or does not fit another option.
        """
        if sum(map(bool, (where, containing, message_ids))) != 1 or "" in message_ids:
            raise PipelineError(
                "erase: must have exactly one of --where, --containing and --message-id. Use one of them."
            )
        if containing and len(containing) < SHORTEST:
            raise PipelineError(
                f"erase.containing: must have {SHORTEST} characters or more, got {containing!r}. Use a longer text."
            )
        if source is not None and not message_ids:
            raise PipelineError("erase.source: applies to ids only. Remove it, or choose messages with --message-id.")
        if message_ids and source is None and len(sources) > 1:
            raise PipelineError(
                f"erase.source: must be set, because ids are unique per source. Add one of {_list(sources)}."
            )
        pairs = _pairs(where)
        if any(text in reason for text in (*pairs.values(), *([containing] if containing else []))):
            raise PipelineError(
                "erase.reason: must not contain what is erased, because the history keeps it. Reword it."
            )
        of = [source] if source else sources[:1]
        keys = tuple(f"{name}\0{message_id}" for name in of for message_id in message_ids)
        return cls(pairs, containing or "", tuple(message_ids), source or "", _values(pairs, columns), keys)

    def columns(self, table: str, schema: pa.Schema) -> list[str]:
        """Return the columns of a table that `found` needs; empty if the table is not searched."""
        if self.where:
            return [*MESSAGE_KEY, *self.values[table]] if table in self.values else []
        if self.containing:
            left_out = _NOT_SEARCHED.get(table, _IDS)
            texts = [field.name for field in schema if _has_text(field.type) and field.name not in left_out]
            return [*MESSAGE_KEY, *texts] if table != "outcomes" else []
        return list(MESSAGE_KEY)

    def found(self, table: str, rows: pa.Table) -> pa.Array:
        """Return the keys, by `keys_of` source and id, of the chosen rows in a table."""
        if self.where:
            masks = [pc.equal(rows[column], value) for column, value in self.values[table].items()]
            mask = reduce(pc.and_, masks)
        elif self.containing:
            columns = [rows[name] for name in rows.schema.names if name not in MESSAGE_KEY]
            mask = reduce(pc.or_, (contain(column, self.containing) for column in columns))
        else:
            mask = pc.is_in(rows["message_id"], pa.array(self.message_ids, pa.string()))
            if self.source:
                mask = pc.and_(mask, pc.equal(rows["source"], self.source))
        return keys_of(rows.filter(mask), *MESSAGE_KEY)

    @property
    def shown(self) -> dict[str, Any]:
        """The choice for the history: names and numbers. A hash of a value could be found by trying values."""
        return {
            "where": list(self.where),
            "containing": bool(self.containing),
            "message_ids": len(self.message_ids) or None,
        }

    @property
    def texts(self) -> list[str]:
        """Texts that must not be quoted elsewhere."""
        return [*self.where.values(), *filter(None, [self.containing]), *self.message_ids]


def contain(column: pa.ChunkedArray, text: str) -> pa.ChunkedArray:
    """Return whether each value of a column contains a text: in UTF-8 or with any escapes of JSON, also nested."""
    if pa.types.is_nested(column.type):
        values = ("\0".join(_texts_in(value)) for value in column.to_pylist())
        column = pa.chunked_array([pa.array(values, pa.string())])
    return pc.fill_null(pc.match_substring_regex(column, "".join(map(_forms, text))), False)


def _forms(character: str) -> str:
    """Return a regular expression for a character and its escapes in JSON, for RE2."""
    codes = character.encode("utf-16-be").hex()
    escapes = "".join(rf"\\u(?i:{codes[place : place + 4]})" for place in range(0, len(codes), 4))
    forms = [f"\\x{{{ord(character):x}}}" if character < "\x80" else character, escapes]
    if short := _SHORT.get(character):
        forms.append(rf"\\\x{{{ord(short):x}}}")
    return f"(?:{'|'.join(forms)})"


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a nested value: those of fields, lists, and of keys and values of maps, which are pairs."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode(errors="replace")
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(inner)


def _pairs(where: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in where:
        column, mark, value = text.partition("=")
        if not (column and mark and value):
            raise PipelineError(
                f"erase.where: must be COLUMN=VALUE, got {text!r}. Use, for example, email=a@example.com."
            )
        if column in pairs:
            raise PipelineError(
                f"erase.where: must name each column once, got {column} twice. Use a command per value."
            )
        pairs[column] = value
    return pairs


def _values(pairs: Mapping[str, str], columns: Mapping[str, pa.Schema]) -> dict[str, dict[str, pa.Scalar]]:
    """Return the values in the types of each table that has all columns."""
    if not pairs:
        return {}
    tables = {table: schema for table, schema in columns.items() if pairs.keys() <= set(schema.names)}
    if not tables:
        known = _list(sorted({name for schema in columns.values() for name in schema.names}))
        raise PipelineError(
            f"erase.where: no table of a batcher has all of the columns {_list(pairs)}. Columns: {known}."
        )
    return {
        table: {column: _value(table, schema.field(column), value) for column, value in pairs.items()}
        for table, schema in tables.items()
    }


def _value(table: str, column: pa.Field, text: str) -> pa.Scalar:
    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
        raise PipelineError(f"erase.where: {table}.{column.name} has the type {column.type}. Use --containing.")
    try:
        return pa.scalar(text).cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise PipelineError(
            f"erase.where: {text!r} is not a valid {column.type}, the type of {table}.{column.name}. Use such a value."
        ) from None


def _has_text(kind: pa.DataType) -> bool:
    """Whether values of a type contain text or bytes."""
    if pa.types.is_nested(kind):
        return any(_has_text(kind.field(place).type) for place in range(kind.num_fields))
    return any(check(kind) for check in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string))


def _list(names: Any) -> str:
    return ", ".join(names)
