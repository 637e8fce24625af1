"""`pipeline-platform trace`: the whole life of one message."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.failure_commands import Json, Name, happened
from pipeline_platform.cli.terminal import say
from pipeline_platform.source.contract import Source, SourceError

if TYPE_CHECKING:  # it loads Polars
    from pipeline_platform.run.trace import Delivery, Held

_SYSTEM = ("table", "source", "message_id", "attempt", "batch_key", "batch_id", "receive_id", "window", "child")


def trace(
    pipeline: Name,
    message_id: Annotated[str, typer.Argument(help="Id of the message.")],
    source: Annotated[str | None, typer.Option(help="Name of its source: ids are unique per source.")] = None,
    as_json: Json = False,
) -> None:
    """Tell the whole life of one message: deliveries, failures, rows, acknowledgement, and what holds it now."""
    from pipeline_platform.run.trace import trace as life

    with loading.opened() as opened:
        one = opened.pipeline(pipeline)
        deliveries = life(opened.flow(one), message_id, source)
        keys = dict.fromkeys(producer.source for producer in one.producers_of().values())
        sources = [opened.sources[key] for key in keys if source in (None, opened.sources[key].name)]
        at_source = {each.name: _asked(each, message_id) for each in sources}
    if as_json:
        found = {"deliveries": list(map(dataclasses.asdict, deliveries)), "at_source": at_source}
        typer.echo(json.dumps(found, default=str))
        return
    for name in dict.fromkeys(each.source for each in deliveries):
        say(f"message {message_id} of {name}")
        for each in deliveries:
            if each.source == name:
                say("\n".join(f"  {line}" for line in _lines(each)))
    if not deliveries:
        kept = one.retention.messages
        gone = f", or its windows are older than retention.messages ({kept.days} days)" if kept else ""
        say(f"{pipeline} has never received message {message_id}{gone}.")
    for name, answer in at_source.items():
        say(f"at {name} now: {answer}")


def _asked(source: Source, message_id: str) -> str:
    try:
        unknown = "nothing can be known of one message without receiving it"
        return source.whereabouts(message_id) or f"{unknown}; waiting there: {source.backlog()}"
    except SourceError as error:
        return f"it {error.summary}: {error}"


def _lines(one: Delivery) -> Iterator[str]:
    run = f"run {one.run_id}" if one.run_id else "a run that is no longer remembered"
    yield f"attempt {one.attempt} in window {one.window}: receive {one.receive_id} of {run}"
    if one.received:
        published, again = one.received["published_at"], ", redelivered" if one.redelivered else ""
        yield f"  {_time(published)} published" if published else "  no time of publication"
        yield f"  {_time(one.received['received_at'])} received{again}"
    if one.replayed_by:
        yield f"  replayed: receive {one.replayed_by} replaced its outcome, failures and rows"
    for event in one.failures:
        yield f"  {happened(event)}"
    for row in one.rows:
        child = "" if row["child"] is None else f", child {row['child']}"
        batch = f", batch {row['batch_id']}" if row["batch_id"] else ""
        data = {name: value for name, value in row.items() if name not in _SYSTEM}
        yield f"  row of {row['table']}, batch key {row['batch_key']}{batch}{child}: {json.dumps(data, default=str)}"
    if one.outcome:
        yield f"  decided: {one.outcome}, to be answered {one.action!r}"
    if one.acknowledged_at:
        yield f"  {_time(one.acknowledged_at)} acknowledged: {one.action}"
    if one.held:
        yield f"  {_state(one.held)}"


def _state(held: Held) -> str:
    if held.lease_until is None:
        return (
            f"{held.phase}, since {_time(held.started_at)}; no run holds it: the next one finishes it, or gives it up"
        )
    return f"{held.phase} now, since {_time(held.started_at)}; its lease is until {_time(held.lease_until)}"


def _time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}"
