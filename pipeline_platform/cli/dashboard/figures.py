"""Figures of a picture as text."""

from collections.abc import Collection, Iterable
from datetime import datetime

from rich.text import Text

from pipeline_platform.cli.dashboard.picture import PipelinePicture, Stage
from pipeline_platform.cli.status.status_data import Health, ProducerStatus
from pipeline_platform.cli.terminal import duration, plain

SIGNS = {
    Health.HEALTHY: ("✓", "green"),
    Health.BEHIND: ("▲", "yellow"),
    Health.FAILING: ("✗", "red"),
    Health.BROKEN: ("✗", "bold red"),
}
"""Sign and style of each state: colours are never the only signal."""


def state_of(pipeline: PipelinePicture) -> Text:
    """Return the state of a pipeline, with a sign beside its colour."""
    status = pipeline.look.status
    if status is None:
        return Text("? unknown", "yellow")
    paused = [producer.pause for producer in status.producers.values() if producer.pause]
    if status.state is Health.HEALTHY and paused:
        return Text("‖ draining" if paused[0].draining_until else "‖ paused", "yellow")
    sign, style = SIGNS[status.state]
    return Text(f"{sign} {status.state}", style)


def waiting(producers: Collection[ProducerStatus]) -> str:
    """Return the messages that wait at the sources of producers."""
    counts = [producer.backlog.messages for producer in producers]
    known = [messages for messages in counts if messages is not None]
    if len(known) < len(counts) or not counts:
        return "unknown"
    least = "≥" if any(producer.backlog.is_minimum for producer in producers) else ""
    return f"{least}{count(sum(known))}"


def oldest(producers: Iterable[ProducerStatus], at: datetime | None) -> str:
    """Return the age that the oldest waiting message had at a time; empty if it is unknown or none waits."""
    times = [producer.backlog.oldest_at for producer in producers if producer.backlog.oldest_at is not None]
    return duration((at - min(times)).total_seconds()) if times and at else ""


def count(number: int) -> str:
    """Return a number of messages."""
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:,.1f} M"


def rate(per_s: float) -> str:
    """Return a rate, per minute if it is below one per second."""
    if per_s == 0:
        return "0/s"
    return f"{per_s:,.0f}/s" if per_s >= 10 else f"{per_s:.1f}/s" if per_s >= 0.95 else f"{per_s * 60:.1f}/min"


def seconds(stage: Stage) -> str:
    """Return the mean seconds of a stage; empty if they are unknown."""
    return "" if stage.seconds is None else f"{stage.seconds:.2f}" if stage.seconds < 10 else f"{stage.seconds:,.0f}"


def line(text: str, style: str = "") -> Text:
    """Return text of users and messages as a line that cannot control the terminal."""
    return Text(" ".join(plain(text).split()), style, no_wrap=True, overflow="ellipsis")
