"""Alerts: a sensor reports each problem once, again if failures increase, and once more when the problem ends."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from urllib.error import HTTPError, URLError

import dagster as dg
from pydantic import AwareDatetime, BaseModel, ValidationError

from pipeline_platform.background import in_background
from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.decisions.ledger import Origin
from pipeline_platform.lake.failures.failed import Counts
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.jobs import job_of, tags_of
from pipeline_platform.orchestration.reports.run_checks import count_failures
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.orchestration.sensors.producer_state import judged
from pipeline_platform.orchestration.sensors.runs_under_way import Tags, newest_runs, runs_with
from pipeline_platform.orchestration.sensors.timely_calls import timely
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import SourceError
from pipeline_platform.telemetry.configuration import export

_EVERY_S = 60
_ANSWERS_WITHIN_S = 10.0
_LOOKS_WITHIN_S = 30.0
_SENDS_WITHIN_S = 45.0
"""Seconds after which a tick sends no more alerts. Dagster drops the cursor of a tick of more than 60 s, and all alerts
would be sent again. An unavailable lake takes two minutes to time out, an unavailable broker ten seconds."""
_AGAIN_AFTER = timedelta(minutes=15)
"""Increasing failures are reported again after this time, and immediately if their number doubles."""
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]
_RED = [dg.DagsterRunStatus.FAILURE]


About: TypeAlias = Literal["runs", "failures", "dead", "backlog", "lost", "source"]


class Alert(NamedTuple):
    """A problem of a pipeline, or the end of a problem.

    Attributes:
        pipeline: Name of the pipeline.
        about: `runs`: a run failed. `failures`: more failures are open than allowed. `dead`: more failures are dead
            than allowed. `backlog`: messages wait longer than `oldest_allowed`. `lost`: the source lost messages.
            `source`: the source does not answer.
        of: Origin of the runs (`source`, `failed`, `messages`, or `maintenance`); the key of the source; or `lake`, if
            failures cannot be counted.
        text: Description of the problem.
        since: Time when the sensor first found the problem.
        over: Whether the problem has ended.
    """

    pipeline: str
    about: About
    of: str
    text: str
    since: datetime
    over: bool


class Alerts(NamedTuple):
    """Destination of alerts, and limits for failures.

    Attributes:
        to: A function that gets each alert; or `dg.EnvVar("ALERTS_URL")`, the variable with the address of a webhook.
            Alerts are posted to the webhook as JSON.
        open_failures: Open failures of a pipeline that cause no alert. Dead failures and failures that `retry` will
            retry are not counted.
        dead_failures: Dead failures of a pipeline that cause no alert.
    """

    to: Callable[[Alert], object] | dg.EnvVar
    open_failures: int = 0
    dead_failures: int = 0


To: TypeAlias = Alerts | Callable[[Alert], object] | dg.EnvVar


class _Look(NamedTuple):
    """Result of a check: the problem, or None; and the number of failures, if the check counts failures."""

    pipeline: str
    about: About
    of: str
    wrong: str | None
    failures: int | None = None

    @property
    def key(self) -> str:
        return f"{self.pipeline} {self.about} {self.of}"


class _Known(BaseModel):
    """Cursor of the sensor.

    Attributes:
        looked_at: Time of the last complete tick.
        wrong: Known problems, by key: start and reported text.
        counts: Reported numbers of failures, by key: time and number. A lower number found later replaces the number.
    """

    looked_at: AwareDatetime
    wrong: dict[str, tuple[AwareDatetime, str]] = {}
    counts: dict[str, tuple[AwareDatetime, int]] = {}

    def is_news(self, look: _Look, now: datetime) -> bool:
        """Whether to report a result: its problem is new, has ended, or its failures have increased."""
        if bool(look.wrong) != (look.key in self.wrong):
            return True
        if look.key not in self.counts or look.failures is None:
            return False
        reported_at, before = self.counts[look.key]
        return look.failures > before and (look.failures >= 2 * before or now >= reported_at + _AGAIN_AFTER)

    def report(self, look: _Look, now: datetime) -> None:
        if look.wrong is None:
            self.wrong.pop(look.key, None)
            self.counts.pop(look.key, None)
            return
        began, _ = self.wrong.get(look.key, (now, ""))
        self.wrong[look.key] = began, look.wrong
        if look.failures is not None:
            self.counts[look.key] = now, look.failures

    def see(self, look: _Look) -> None:
        """Store a number of failures if it is lower, so that later increases are measured from it."""
        if look.key in self.counts and look.failures is not None:
            reported_at, before = self.counts[look.key]
            self.counts[look.key] = reported_at, min(before, look.failures)

    @classmethod
    def from_json(cls, text: str | None, now: datetime) -> "_Known":
        """Read a cursor. An unreadable cursor is treated as a first tick."""
        try:
            return cls.model_validate_json(text or "")
        except ValidationError:
            return cls(looked_at=now)


def alerts_sensor(pipelines: Sequence[type[Pipeline]], alerts: To) -> dg.SensorDefinition:
    """Build the sensor `alerts` of a deployment."""
    options = alerts if isinstance(alerts, Alerts) else Alerts(alerts)
    to = options.to
    sources = {producer.source for pipeline in pipelines for producer in BoundProducer.all_of(pipeline)}

    @dg.sensor(
        name="alerts",
        minimum_interval_seconds=_EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Looks for failed runs, open failures, messages that wait too long, and sources that do not "
        "answer. Sends an alert when a problem starts and when it ends.",
        required_resource_keys={"lake", "control", *sources},
    )
    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        if isinstance(to, dg.EnvVar) and not to.get_value():
            raise ValueError(
                f"platform_definitions(alerts=...): {to.env_var_name} is not set. Set it to the address of the webhook"
            )
        export()
        started, now = time.monotonic(), datetime.now(UTC)
        known = _Known.from_json(context.cursor, now)
        answers = _answers(_questions(pipelines, context.resources))
        wrong, unsent = [], ""
        for look in (
            look
            for pipeline in pipelines
            for look in _looks(pipeline, context.instance, answers, options, known.looked_at)
        ):
            wrong += [look.wrong] if look.wrong else []
            known.see(look)
            if unsent or not known.is_news(look, now):
                continue
            if time.monotonic() - started > _SENDS_WITHIN_S:
                unsent = f"Some alerts were not sent within {_SENDS_WITHIN_S:g} s. The next tick sends them. "
                continue
            began, text = known.wrong.get(look.key, (now, ""))
            alert = Alert(*look[:3], look.wrong or f"Resolved: {text}", began, over=not look.wrong)
            try:
                _send(to, alert)
            except Exception as error:  # the user's function may raise anything; its text may contain a secret
                unsent = f"Could not send alerts ({_kind(error)}). The next tick tries again. "
            else:
                known.report(look, now)
        cursor = known.model_copy(update={} if unsent else {"looked_at": now})
        return dg.SensorResult(
            skip_reason=f"{unsent}{' '.join(wrong) or 'No problems found.'}", cursor=cursor.model_dump_json()
        )

    return evaluate


_Answers: TypeAlias = Mapping[tuple[str, str], Any]
"""Failures by window of each pipeline, and the backlog of each source; or the exception that was raised instead."""


def _questions(pipelines: Sequence[type[Pipeline]], resources: Any) -> dict[tuple[str, str], Callable[[], Any]]:
    sources = {producer.source for pipeline in pipelines for producer in BoundProducer.all_of(pipeline)}
    return {
        **{("failures", each.name): partial(count_failures, each, resources.lake) for each in pipelines},
        **{("source", source): partial(_backlog, resources, source) for source in sources},
    }


def _backlog(resources: Any, name: str) -> Backlog:
    source = source_of(resources, name)
    return timely(source, "backlog", source.backlog, _LOOKS_WITHIN_S)


def _answers(questions: Mapping[tuple[str, str], Callable[[], Any]]) -> _Answers:
    """Ask all questions in parallel, so that an unavailable source does not delay the others."""
    asked = {key: in_background(question, " ".join(key)) for key, question in questions.items()}
    done, _ = wait(asked.values(), _LOOKS_WITHIN_S)
    late = TimeoutError(f"no answer within {_LOOKS_WITHIN_S:g} s")
    return {key: (answer.exception() or answer.result()) if answer in done else late for key, answer in asked.items()}


def _looks(
    pipeline: type[Pipeline], instance: dg.DagsterInstance, answers: _Answers, options: Alerts, since: datetime
) -> Iterator[_Look]:
    name = pipeline.name
    for origin in get_args(Origin):
        yield _Look(name, "runs", origin, _red(instance, since, job_of(pipeline, origin), tags_of(pipeline, origin)))
    yield _Look(name, "runs", "maintenance", _red(instance, since, f"{name}_maintenance", {}))
    yield from _of_failures(pipeline, answers["failures", name], options)
    for producer in BoundProducer.all_of(pipeline):
        yield from _of_source(producer, answers["source", producer.source])


def _red(instance: dg.DagsterInstance, since: datetime, job: str, tags: Tags) -> str | None:
    """Return that the newest of the selected runs failed, or another run since the last tick; None otherwise."""
    newest = newest_runs(instance, job, _ENDED, tags, 1)
    since_then = [run for run in runs_with(instance, _RED, tags, since) if tags or run.dagster_run.job_name == job]
    red = [record.dagster_run for record in (*newest, *since_then) if record.dagster_run.status in _RED]
    return f"Run {red[0].run_id} of {red[0].job_name} failed." if red else None


def _of_failures(
    pipeline: type[Pipeline], by_window: Mapping[str, Counts] | Exception, options: Alerts
) -> Iterator[_Look]:
    name = pipeline.name
    if isinstance(by_window, Exception):  # the results about the numbers stay as they were
        yield _Look(name, "failures", "lake", f"Could not count the failures of {name}: {_kind(by_window)}.")
        return
    yield _Look(name, "failures", "lake", None)
    dead = sum(counts.dead for counts in by_window.values())
    # Without `retry`, failures that were scheduled when the class still had it are never retried.
    scheduled = sum(counts.scheduled for counts in by_window.values()) if pipeline.retry else 0
    waiting = sum(counts.open for counts in by_window.values()) - dead - scheduled
    yield _of_count(name, "failures", waiting, options.open_failures, "open", " without an automatic retry")
    yield _of_count(name, "dead", dead, options.dead_failures, "dead")


def _of_count(name: str, about: About, count: int, allowed: int, state: str, detail: str = "") -> _Look:
    failures = f"{count:,} {state} {'failure' if count == 1 else 'failures'}"
    wrong = f"{name} has {failures}{detail}, more than the allowed {allowed:,}." if count > allowed else None
    return _Look(name, about, "", wrong, count)


def _of_source(producer: BoundProducer, waiting: Backlog | Exception) -> Iterator[_Look]:
    name, source = producer.pipeline.name, producer.source
    if isinstance(waiting, Exception):  # the result about the backlog stays as it was
        known = isinstance(waiting, SourceError | ControlStoreError | TimeoutError)
        why = str(waiting) if known else _kind(waiting)
        problem = waiting.summary if isinstance(waiting, SourceError) else "does not answer"
        yield _Look(name, "source", source, f"{source} of {name} {problem}: {why}")
        return
    yield _Look(name, "source", source, None)
    # A loss is a problem of its own: the alert for messages that wait too long was often sent before.
    yield _Look(name, "lost", source, f"{source} of {name} lost messages: {waiting.lost}" if waiting.lost else None)
    passed, words = judged(waiting._replace(lost=""), producer.options.oldest_allowed)
    yield _Look(name, "backlog", source, None if passed else f"{source} of {name}: {words}")


def _send(to: Callable[[Alert], object] | dg.EnvVar, alert: Alert) -> None:
    if not isinstance(to, dg.EnvVar):
        to(alert)
        return
    body = json.dumps(alert._asdict() | {"since": alert.since.isoformat(timespec="seconds")}).encode()
    request = urllib.request.Request(str(to.get_value()), body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=_ANSWERS_WITHIN_S):  # noqa: S310 - the deployer sets the address
        pass


def _kind(error: Exception) -> str:
    """Return the kind of an error, without its text, which may contain an address."""
    if isinstance(error, HTTPError):
        return f"HTTP status {error.code}"
    return str(error.reason) if isinstance(error, URLError) else type(error).__name__
