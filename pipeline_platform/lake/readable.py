"""Checks for values that every reader of a table can read: UTF-8 text, and times within the years 1 to 9999."""

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.model.columns.casts import ColumnError, beyond_calendar, is_time


def refuse_unreadable(names: Iterable[str], columns: Iterable[pa.Array]) -> None:
    """Check that every reader can read columns, including nested values.

    Raises:
        ColumnError: A column has a value that some readers cannot read. The message contains the column.
    """
    for name, column in zip(names, columns, strict=True):
        if (why := _unreadable(column)) is not None:
            raise ColumnError(f"{name} has {why}")


def refuse_nul(names: Iterable[str], columns: Iterable[pa.Array]) -> None:
    """Check that no text contains the character NUL, which databases cannot store.

    Raises:
        ColumnError: A column has such a text, also inside a list, a model or a dict. The message contains the column.
    """
    for name, column in zip(names, columns, strict=True):
        for texts in _parts(column, _is_text):
            if pc.any(pc.match_substring(texts, "\0")).as_py():
                raise ColumnError(
                    f"{name}: contains the character NUL, which the sink cannot store. Remove it in a callback or at "
                    "the sender"
                )


def _unreadable(column: pa.Array) -> str | None:
    """Return the reason why some readers cannot read a column, or None."""
    # In lists, Arrow also validates values outside a slice; a copy contains only the slice.
    if not _is_valid(column) and not _is_valid(column.take(pa.array(range(len(column)), pa.int64()))):
        return "text that is not UTF-8, or a number that does not fit its type"
    return "a time outside the years 1 to 9999" if any(map(beyond_calendar, _parts(column, is_time))) else None


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _parts(column: pa.Array, are_meant: Callable[[pa.DataType], bool]) -> Iterator[pa.Array]:
    """Yield the arrays of some types in a column, including nested values."""
    if are_meant(column.type):
        yield column
    elif pa.types.is_map(column.type):  # Arrow does not flatten maps
        first, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        for inner in column.keys, column.items:
            yield from _parts(inner.slice(first, end - first), are_meant)
    elif pa.types.is_nested(column.type):
        inner = column.flatten()
        for child in inner if isinstance(inner, list) else [inner]:
            yield from _parts(child, are_meant)
