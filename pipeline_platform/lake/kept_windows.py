"""The windows of a pipeline's tables: what was kept of the options that they follow from."""

from collections.abc import Callable, Collection
from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, ValidationError

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.cron import canonical
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.model.windows import WINDOW_FORMAT


class KeptWindows(BaseModel, frozen=True):
    """The options that windows follow from."""

    window_cron: str
    first_window: AwareDatetime


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
        if begins < pipeline.first_window:
            raise PipelineError(
                f"{name}.first_window is {pipeline.first_window.isoformat()}: the tables of {pipeline.name} hold data "
                f"from window {oldest} on, and what is before first_window could not be retried. "
                f"Set it to {begins.isoformat()} or earlier"
            )
    lake.write(path, ours.model_dump_json().encode())
