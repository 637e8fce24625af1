"""`pipeline-platform trace`: the history of a message."""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.failures.failure_views import happened
from pipeline_platform.cli.lake.deliveries import Delivery, Unfinished, deliveries_of
from pipeline_platform.cli.options import Json, Name
from pipeline_platform.cli.output import Output, print_json
from pipeline_platform.cli.terminal import say
from pipeline_platform.cli.waiting import waiting
from pipeline_platform.lake.tables import ERASED
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.message import SYSTEM_COLUMNS
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Source, SourceError

_SYSTEM = ("table", *SYSTEM_COLUMNS)


class AtSource(Output):
    """A message at its source now."""

    place: str | None = Field(
        description="Location of the message, as the source describes it. Null if the source cannot look it up."
    )
    backlog: int | None = Field(None, description="Messages that wait at a source that cannot look up the message.")
    error: str | None = Field(None, description="Error of the source. Null if it answered.")


class TraceOutput(Output):
    """Output of `trace`."""

    deliveries: list[Delivery] = Field(description="Recorded deliveries, in order.")
    at_source: dict[str, AtSource] = Field(description="The message at its sources, by the name of the source.")


def trace(
    pipeline: Name,
    message_id: Annotated[str, typer.Argument(help="Id of the message.")],
    source: Annotated[str | None, typer.Option(help="Name of its source. Ids are unique per source.")] = None,
    as_json: Json = False,
) -> None:
    """Show the history of a message: deliveries, failures, rows, acknowledgement, and its current lease."""
    with loading.opened() as opened:
        of = opened.pipeline(pipeline)
        with waiting("the lake"):
            deliveries = deliveries_of(opened.flow(of), message_id, source)
        keys = dict.fromkeys(producer.source for producer in BoundProducer.all_of(of))
        sources = [opened.sources[key] for key in keys if source in (None, opened.sources[key].name)]
        at_source = {each.name: _asked(each, message_id) for each in sources}
    if as_json:
        print_json(TraceOutput(deliveries=deliveries, at_source=at_source))
        return
    for name in dict.fromkeys(each.source for each in deliveries):
        say(f"Message {message_id} of {name}")
        for each in deliveries:
            if each.source == name:
                say(*(f"  {line}" for line in _lines(each)))
    if not deliveries:
        kept = of.retention.messages
        gone = f", or its windows are older than retention.messages ({kept.days} days)" if kept else ""
        say(f"{pipeline} has not received message {message_id}{gone}.")
    for name, answer in at_source.items():
        say(f"Now at {name}: {_place(answer)}")


def _asked(source: Source, message_id: str) -> AtSource:
    try:
        place = source.location(message_id)
        return AtSource(place=place, backlog=None if place else source.backlog().counted)
    except SourceError as error:
        return AtSource(place=None, error=f"the source {error.summary}: {error}")


def _place(answer: AtSource) -> str:
    if answer.backlog is None:
        return answer.error or answer.place or "this source cannot look up a single message"
    return f"this source cannot look up a single message; its backlog: {Backlog(answer.backlog)}"


def _lines(delivery: Delivery) -> Iterator[str]:
    if delivery.outcome == ERASED:
        yield f"attempt {delivery.attempt} in window {delivery.window}: erased"
        return
    run = f"run {delivery.run_id}" if delivery.run_id else "a run that is no longer recorded"
    yield f"attempt {delivery.attempt} in window {delivery.window}: receive {delivery.receive_id} of {run}"
    if delivery.received:
        published, again = delivery.received["published_at"], ", redelivered" if delivery.redelivered else ""
        yield f"  {_time(published)} published" if published else "  time of publication unknown"
        yield f"  {_time(delivery.received['received_at'])} received{again}"
    if delivery.replayed_by:
        yield f"  replaced by the replay in receive {delivery.replayed_by}: outcome, failures and rows"
    for event in delivery.failures:
        yield f"  {happened(event)}"
    for row in delivery.rows:
        child = "" if row["child"] is None else f", child {row['child']}"
        batch = f", batch {row['batch_id']}" if row["batch_id"] else ""
        data = {name: value for name, value in row.items() if name not in _SYSTEM}
        yield f"  row in {row['table']}, batch key {row['batch_key']}{batch}{child}: {json.dumps(data, default=str)}"
    if delivery.outcome:
        yield f"  decided: {delivery.outcome}, ack action {delivery.action!r}"
    if delivery.acknowledged_at:
        yield f"  {_time(delivery.acknowledged_at)} acknowledged: {delivery.action}"
    if delivery.unfinished:
        yield f"  {_state(delivery.unfinished)}"


def _state(receive: Unfinished) -> str:
    since = _time(receive.started_at)
    if receive.lease_until is None:
        return f"{receive.phase}, since {since}; no run renews its lease: the next run finishes or releases it"
    return f"{receive.phase} now, since {since}; its lease is until {_time(receive.lease_until)}"


def _time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}"
