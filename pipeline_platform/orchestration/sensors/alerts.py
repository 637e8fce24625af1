"""Alerts: a sensor looks what is wrong with the pipelines, and reports it once, and once more when it is over."""

import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from urllib.error import HTTPError, URLError

import dagster as dg

from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.ledger import Origin
from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.orchestration.sensors.producer_state import judged
from pipeline_platform.source.contract import SourceError

_EVERY_S = 60
_ANSWERS_WITHIN_S = 10.0
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]
_RED = [dg.DagsterRunStatus.FAILURE]


class Alert(NamedTuple):
    """What is wrong with a pipeline, or no longer is.

    Attributes:
        pipeline: Its name.
        about: `runs`: one has failed. `failures`: more are open than allowed. `backlog`: messages wait longer than
            `oldest_allowed`, or were lost. `source`: it does not answer.
        of: Which runs (`source`, `failed`, `messages`, as their origin, or `maintenance`), or the key of the source.
        text: A sentence for people.
        since: When the sensor first found it.
        over: Whether it is over.
    """

    pipeline: str
    about: Literal["runs", "failures", "backlog", "source"]
    of: str
    text: str
    since: datetime
    over: bool


class Alerts(NamedTuple):
    """Where alerts go, and what they are about.

    Attributes:
        to: A function that gets each alert; or the address of a webhook, by the name of a variable,
            `dg.EnvVar("ALERTS_URL")`: an alert is posted to it as JSON.
        open_failures: How many failures of a pipeline may be open, dead ones included, without an alert.
    """

    to: Callable[[Alert], object] | dg.EnvVar
    open_failures: int = 0


To: TypeAlias = Alerts | Callable[[Alert], object] | dg.EnvVar


class _Look(NamedTuple):
    """One thing that was looked at: what is wrong with it, or None."""

    pipeline: str
    about: Literal["runs", "failures", "backlog", "source"]
    of: str
    wrong: str | None

    @property
    def key(self) -> str:
        return f"{self.pipeline} {self.about} {self.of}"


def alerts_sensor(pipelines: Sequence[type[Pipeline]], alerts: To) -> dg.SensorDefinition:
    """Build the sensor `alerts` of a deployment. Its cursor keeps what is wrong, since when, and was reported."""
    to, allowed = alerts if isinstance(alerts, Alerts) else Alerts(alerts)
    sources = {producer.source for pipeline in pipelines for producer in pipeline.producers_of().values()}

    @dg.sensor(
        name="alerts",
        minimum_interval_seconds=_EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Looks for red runs, open failures, messages that wait too long and sources that do not answer, "
        "and reports each once, and once more when it is over.",
        required_resource_keys={"lake", "control", *sources},
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        if isinstance(to, dg.EnvVar) and not to.get_value():
            raise ValueError(f"{to.env_var_name} is not set: platform_definitions(alerts=...) has alerts posted there")
        now, before = datetime.now(UTC), json.loads(context.cursor or "{}")
        since = datetime.fromisoformat(before.get("looked_at", now.isoformat()))
        wrong, known, unsent = [], before.get("wrong", {}), ""
        for one in (one for pipeline in pipelines for one in _looks(pipeline, context, allowed, since)):
            wrong += [one.wrong] if one.wrong else []
            began, text = known.get(one.key, (now.isoformat(), ""))
            if unsent or bool(one.wrong) == (one.key in known):
                continue
            text = one.wrong or f"Over: {text}"
            try:
                _send(to, Alert(*one[:3], text, datetime.fromisoformat(began), over=not one.wrong))
            except Exception as error:  # of whatever the function does; its words may hold a secret, as an address may
                unsent = f"Alerts cannot be sent, {_kind(error)}; the next tick tries again. "
            else:
                known = {key: said for key, said in known.items() if key != one.key}
                known |= {one.key: (began, text)} if one.wrong else {}
        cursor = {"looked_at": (since if unsent else now).isoformat(), "wrong": known}
        return dg.SensorResult(
            skip_reason=f"{unsent}{' '.join(wrong) or 'Nothing is wrong.'}", cursor=json.dumps(cursor)
        )

    return look


def _looks(
    pipeline: type[Pipeline], context: dg.SensorEvaluationContext, allowed: int, since: datetime
) -> Iterator[_Look]:
    name, origin = pipeline.name, RunTags.of(pipeline).origin
    runs: dict[str, dict[str, Any]] = {one: {"tags": {origin: one}} for one in get_args(Origin)}
    for of, which in (runs | {"maintenance": {"job_name": f"{name}_maintenance"}}).items():
        yield _Look(name, "runs", of, _red(context.instance, since, which))
    yield _Look(name, "failures", "", _open_failures(pipeline, context.resources.lake, allowed))
    for producer in pipeline.producers_of().values():
        yield from _of_source(name, producer, context.resources)


def _red(instance: dg.DagsterInstance, since: datetime, which: dict[str, Any]) -> str | None:
    """Say that the newest of some runs has failed, or one since the last look."""
    newest = instance.get_run_records(dg.RunsFilter(**which, statuses=_ENDED), limit=1)
    since_then = instance.get_run_records(dg.RunsFilter(**which, statuses=_RED, updated_after=since), limit=1)
    red = [one.dagster_run for one in (*newest, *since_then) if one.dagster_run.status in _RED]
    return f"Run {red[0].run_id} of {red[0].job_name} failed." if red else None


def _open_failures(pipeline: type[Pipeline], lake: Any, allowed: int) -> str | None:
    try:
        by_window = FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name).open_by_window()
    except Exception as error:  # of whatever storage the lake is on: the rest is looked at all the same
        return f"Failures of {pipeline.name} cannot be counted: {_kind(error)}."
    count = sum(by_window.values())
    return f"{count:,} failures of {pipeline.name} are open; {allowed:,} are allowed." if count > allowed else None


def _of_source(name: str, producer: Producer, resources: Any) -> Iterator[_Look]:
    try:
        waiting = source_of(resources, producer.source).backlog()
    except (SourceError, ControlStoreError) as error:  # how long messages wait is as it was
        yield _Look(name, "source", producer.source, f"{producer.source} of {name} does not answer: {error}")
        return
    yield _Look(name, "source", producer.source, None)
    passed, words = judged(waiting, producer.oldest_allowed)
    yield _Look(name, "backlog", producer.source, None if passed else f"{producer.source} of {name}: {words}")


def _send(to: Callable[[Alert], object] | dg.EnvVar, alert: Alert) -> None:
    if not isinstance(to, dg.EnvVar):
        to(alert)
        return
    body = json.dumps(alert._asdict() | {"since": alert.since.isoformat(timespec="seconds")}).encode()
    request = urllib.request.Request(str(to.get_value()), body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=_ANSWERS_WITHIN_S):  # noqa: S310 - whoever deploys names the address
        pass


def _kind(error: Exception) -> str:
    """What an error is, without words that may hold an address."""
    if isinstance(error, HTTPError):
        return f"HTTP status {error.code}"
    return str(error.reason) if isinstance(error, URLError) else type(error).__name__
