"""What may not change once there is data: the options that windows follow from, and the types of columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import AwareDatetime, BaseModel, ValidationError

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.cron import canonical
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.model.windows import WINDOW_FORMAT

if TYPE_CHECKING:
    from deltalake.schema import Field

_WORDS = {"long": "integer", "string": "text", "double": "number", "boolean": "yes or no", "binary": "bytes"}


class SchemaChangeError(PipelineError):
    """A column changed its type. Names table, column, both types and the way out."""


def refuse_changes(table: str, there: Sequence[Field], ours: Sequence[Field]) -> None:
    """Refuse a model whose fields have other types than the columns of its table.

    Raises:
        SchemaChangeError: Some have: `a: integer in the table, text in the model`.
    """
    kept = {field.name: field for field in there}
    if changes := [change for field in ours if field.name in kept for change in _changes(kept[field.name], field)]:
        raise SchemaChangeError(
            f"{table}: {'; '.join(changes)}. Give the field a new name, or write the batcher to a table of another name"
        )


def _changes(there: Field, ours: Field, inside: str = "") -> Iterator[str]:
    name = f"{inside}{ours.name}"
    old: Any = there.type
    new: Any = ours.type
    if old == new:
        return
    if _kind(old) == _kind(new) == "struct":
        kept = {field.name: field for field in old.fields}
        for field in new.fields:
            if field.name in kept:
                yield from _changes(kept.pop(field.name), field, f"{name}.")
            else:
                yield f"{name}.{field.name}: not in the table, {_in_words(field.type)} in the model"
        yield from (
            f"{name}.{gone}: {_in_words(field.type)} in the table, not in the model" for gone, field in kept.items()
        )
    else:
        yield f"{name}: {_in_words(old)} in the table, {_in_words(new)} in the model"


def _kind(type_: Any) -> str:
    return str(type_.type)


def _in_words(type_: Any) -> str:
    """A type as one says it: `list of text`."""
    match _kind(type_):
        case "array":
            return f"list of {_in_words(type_.element_type)}"
        case "map":
            return f"dict of {_in_words(type_.value_type)}"
        case "struct":
            return f"model of {', '.join(f'{field.name} ({_in_words(field.type)})' for field in type_.fields)}"
        case kind:
            return _WORDS.get(kind, kind.partition("(")[0])


class KeptWindows(BaseModel, frozen=True):
    """The options that windows follow from."""

    window_cron: str
    first_window: AwareDatetime | None


def check_windows(lake: Lake, pipeline: type[Pipeline], windows_with_data: Callable[[], Collection[str]]) -> None:
    """Refuse options by which data would lie in other windows or in none; write down those that are new.

    Without data every change is harmless, and with data a `first_window` before it: a window's beginning follows from
    `window_cron` alone. `windows_with_data` is asked only where the options changed.

    Raises:
        PipelineError: `window_cron` changed under data, `first_window` is later than data, or what was kept cannot
            be read.
    """
    name, path = pipeline.__qualname__, f"{pipeline.name}/_windows.json"
    ours = KeptWindows(window_cron=canonical(pipeline.window_cron), first_window=pipeline.first_window)
    content = lake.read(path)
    try:
        kept = None if content is None else KeptWindows.model_validate_json(content)
    except ValidationError as error:
        raise PipelineError(
            f"{lake.uri(path)} cannot be read ({error.errors()[0]['type']}): restore it, or remove it if "
            f"{name}.window_cron is what the tables were made with"
        ) from None
    if kept == ours:
        return
    if oldest := min(windows_with_data(), default=None):
        if kept and kept.window_cron != ours.window_cron:
            raise PipelineError(
                f"{name}.window_cron is {pipeline.window_cron!r}: the tables of {pipeline.name} hold windows of "
                f"{kept.window_cron!r}, whose keys would mean other times. Set it back, or give the pipeline a new name"
            )
        begins = datetime.strptime(oldest, WINDOW_FORMAT).replace(tzinfo=UTC)
        if pipeline.first_window and begins < pipeline.first_window:
            raise PipelineError(
                f"{name}.first_window is {pipeline.first_window.isoformat()}: the tables of {pipeline.name} hold data "
                f"from window {oldest} on, and what is before first_window could not be retried. "
                f"Set it to {begins.isoformat()} or earlier"
            )
    lake.write(path, ours.model_dump_json().encode())
