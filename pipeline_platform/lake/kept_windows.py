"""What a pipeline's windows were when its tables were made: kept beside them, for a window's key does not tell."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.cron import canonical
from pipeline_platform.model.options import PipelineError
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import WINDOW_FORMAT


class KeptWindows(BaseModel):
    """The options that windows follow from."""

    model_config = ConfigDict(frozen=True)

    window_cron: str
    first_window: AwareDatetime


def check_windows(lake: Lake, pipeline: type[Pipeline], windows_with_data: Callable[[], Collection[str]]) -> None:
    """Refuse options by which what lies in the tables would be in other windows or in none; keep the others.

    Without data every change is harmless, and with data a `first_window` before it: a window's beginning follows from
    `window_cron` alone.

    Args:
        lake: Where the tables are.
        pipeline: Whose.
        windows_with_data: Called where the options are not the kept ones.

    Raises:
        PipelineError: `window_cron` changed under data, `first_window` is later than data, or what was kept cannot
            be read.
    """
    path = f"{pipeline.name}/_windows.json"
    ours = KeptWindows(window_cron=canonical(pipeline.window_cron), first_window=pipeline.first_window)
    content = lake.read(path)
    try:
        kept = None if content is None else KeptWindows.model_validate_json(content)
    except ValidationError as error:
        raise PipelineError(
            f"{lake.uri(path)} cannot be read ({error.errors()[0]['type']}): restore it, or remove it if "
            f"{pipeline.__qualname__}.window_cron is what the tables were made with"
        ) from None
    if kept == ours:
        return
    windows = sorted(windows_with_data())
    if windows and kept and kept.window_cron != ours.window_cron:
        raise PipelineError(
            f"{pipeline.__qualname__}.window_cron is {pipeline.window_cron!r}: the tables of {pipeline.name} hold "
            f"windows of {kept.window_cron!r}, whose keys would mean other times. "
            f"Set it back, or give the pipeline a new name"
        )
    if windows and _start(windows[0]) < pipeline.first_window:
        raise PipelineError(
            f"{pipeline.__qualname__}.first_window is {pipeline.first_window.isoformat()}: the tables of "
            f"{pipeline.name} hold data from window {windows[0]} on, and what is before first_window "
            f"could not be driven again. "
            f"Set it to {_start(windows[0]).isoformat()} or earlier"
        )
    lake.write(path, ours.model_dump_json().encode())


def _start(window: str) -> datetime:
    return datetime.strptime(window, WINDOW_FORMAT).replace(tzinfo=UTC)
