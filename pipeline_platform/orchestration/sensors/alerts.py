"""Alerts: a sensor reports each problem once, again if failures grow, and when the problem ends."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from urllib.error import HTTPError, URLError

import dagster as dg
from pydantic import AwareDatetime, BaseModel, ValidationError

from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.failed import Counts, FailedMessages
from pipeline_platform.lake.ledger import Origin
from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.orchestration.sensors.producer_state import judged
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import SourceError

_EVERY_S = 60
_ANSWERS_WITHIN_S = 10.0
_LOOKS_WITHIN_S = 30.0
_SENDS_WITHIN_S = 45.0
"""Dagster gives a tick 60 s, and drops the cursor of one that takes longer: all would be sent once more. A lake that is
away takes two minutes to say so, a cluster ten seconds for each of its sources."""
_AGAIN_AFTER = timedelta(minutes=15)
"""Failures that grow are reported again after this time, and at once when their number has doubled."""
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]
_RED = [dg.DagsterRunStatus.FAILURE]


About: TypeAlias = Literal["runs", "failures", "dead", "backlog", "source"]


class Alert(NamedTuple):
    """What is wrong with a pipeline, or no longer is.

    Attributes:
        pipeline: Its name.
        about: `runs`: one has failed. `failures`: more are open than allowed. `dead`: more are dead than allowed.
            `backlog`: messages wait longer than `oldest_allowed`, or were lost. `source`: it does not answer.
        of: Which runs (`source`, `failed`, `messages`, as their origin, or `maintenance`), or the key of the source.
        text: A sentence for people.
        since: When the sensor first found it.
        over: Whether it is over.
    """

    pipeline: str
    about: About
    of: str
    text: str
    since: datetime
    over: bool


class Alerts(NamedTuple):
    """Where alerts go, and what they are about.

    Attributes:
        to: A function that gets each alert; or the address of a webhook, by the name of a variable,
            `dg.EnvVar("ALERTS_URL")`: an alert is posted to it as JSON.
        open_failures: How many failures of a pipeline may be open without an alert. Dead failures and those that
            `retry` will retry are not counted.
        dead_failures: How many failures of a pipeline may be dead without an alert.
    """

    to: Callable[[Alert], object] | dg.EnvVar
    open_failures: int = 0
    dead_failures: int = 0


To: TypeAlias = Alerts | Callable[[Alert], object] | dg.EnvVar


class _Look(NamedTuple):
    """One thing that was looked at: what is wrong with it, or None; and how many failures that is."""

    pipeline: str
    about: About
    of: str
    wrong: str | None
    failures: int | None = None

    @property
    def key(self) -> str:
        return f"{self.pipeline} {self.about} {self.of}"


class _Known(BaseModel):
    """The cursor.

    Attributes:
        looked_at: When the sensor last looked.
        wrong: What is wrong, by key: since when, and the text that was reported.
        counts: How many failures were reported, by key, and when. A lower number found since replaces the number.
    """

    looked_at: AwareDatetime
    wrong: dict[str, tuple[AwareDatetime, str]] = {}
    counts: dict[str, tuple[AwareDatetime, int]] = {}

    def is_news(self, look: _Look, now: datetime) -> bool:
        """Whether to report a look: it is newly wrong, newly right, or its failures have grown."""
        if bool(look.wrong) != (look.key in self.wrong):
            return True
        if look.key not in self.counts or look.failures is None:
            return False
        reported_at, before = self.counts[look.key]
        return look.failures > before and (look.failures >= 2 * before or now >= reported_at + _AGAIN_AFTER)

    def report(self, look: _Look, now: datetime) -> None:
        """Note that a look was reported."""
        if look.wrong is None:
            self.wrong.pop(look.key, None)
            self.counts.pop(look.key, None)
            return
        began, _ = self.wrong.get(look.key, (now, ""))
        self.wrong[look.key] = began, look.wrong
        if look.failures is not None:
            self.counts[look.key] = now, look.failures

    def see(self, look: _Look) -> None:
        """Note a number of failures that has fallen: what comes on top of it is growth."""
        if look.key in self.counts and look.failures is not None:
            reported_at, before = self.counts[look.key]
            self.counts[look.key] = reported_at, min(before, look.failures)

    @classmethod
    def from_json(cls, text: str | None, now: datetime) -> "_Known":
        """Read a cursor; one that cannot be read counts as that of a sensor that looks for the first time."""
        try:
            return cls.model_validate_json(text or "")
        except ValidationError:
            return cls(looked_at=now)


def alerts_sensor(pipelines: Sequence[type[Pipeline]], alerts: To) -> dg.SensorDefinition:
    """Build the sensor `alerts` of a deployment."""
    options = alerts if isinstance(alerts, Alerts) else Alerts(alerts)
    to = options.to
    sources = {producer.source for pipeline in pipelines for producer in pipeline.producers_of().values()}

    @dg.sensor(
        name="alerts",
        minimum_interval_seconds=_EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Looks for red runs, open failures, messages that wait too long and sources that do not answer, "
        "and reports each once, and once more when it is over.",
        required_resource_keys={"lake", "control", *sources},
    )
    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        if isinstance(to, dg.EnvVar) and not to.get_value():
            raise ValueError(f"{to.env_var_name} is not set: platform_definitions(alerts=...) has alerts posted there")
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
                unsent = "There was no time to send all alerts; the next tick goes on. "
                continue
            began, text = known.wrong.get(look.key, (now, ""))
            alert = Alert(*look[:3], look.wrong or f"Over: {text}", began, over=not look.wrong)
            try:
                _send(to, alert)
            except Exception as error:  # of whatever the function does; its words may hold a secret, as an address may
                unsent = f"Alerts cannot be sent, {_kind(error)}; the next tick tries again. "
            else:
                known.report(look, now)
        cursor = known.model_copy(update={} if unsent else {"looked_at": now})
        return dg.SensorResult(
            skip_reason=f"{unsent}{' '.join(wrong) or 'Nothing is wrong.'}", cursor=cursor.model_dump_json()
        )

    return evaluate


_Answers: TypeAlias = Mapping[tuple[str, str], Any]
"""The failures by window, of each pipeline, and the backlog of each source; or what was raised in its place."""


def _questions(pipelines: Sequence[type[Pipeline]], resources: Any) -> dict[tuple[str, str], Callable[[], Any]]:
    lake, producers = resources.lake, (one for pipeline in pipelines for one in pipeline.producers_of().values())
    failed = {one.name: FailedMessages(name=one.name, lake=lake, pipeline=one.name) for one in pipelines}
    return {
        **{("failures", name): one.by_window for name, one in failed.items()},
        **{("source", one.source): partial(_backlog, resources, one.source) for one in producers},
    }


def _backlog(resources: Any, source: str) -> Backlog:
    return source_of(resources, source).backlog()


def _answers(questions: Mapping[tuple[str, str], Callable[[], Any]]) -> _Answers:
    """Ask all at once, so that what is away holds up nothing else."""
    threads = ThreadPoolExecutor(len(questions) or 1)
    asked = {key: threads.submit(question) for key, question in questions.items()}
    threads.shutdown(wait=False)
    done, _ = wait(asked.values(), _LOOKS_WITHIN_S)
    late = TimeoutError(f"no answer within {_LOOKS_WITHIN_S:g} s")
    return {key: (one.exception() or one.result()) if one in done else late for key, one in asked.items()}


def _looks(
    pipeline: type[Pipeline], instance: dg.DagsterInstance, answers: _Answers, options: Alerts, since: datetime
) -> Iterator[_Look]:
    name, origin = pipeline.name, RunTags.of(pipeline).origin
    runs: dict[str, dict[str, Any]] = {one: {"tags": {origin: one}} for one in get_args(Origin)}
    for of, which in (runs | {"maintenance": {"job_name": f"{name}_maintenance"}}).items():
        yield _Look(name, "runs", of, _red(instance, since, which))
    yield from _of_failures(pipeline, answers["failures", name], options)
    for producer in pipeline.producers_of().values():
        yield from _of_source(name, producer, answers["source", producer.source])


def _red(instance: dg.DagsterInstance, since: datetime, which: dict[str, Any]) -> str | None:
    """Say that the newest of some runs has failed, or one since the last look."""
    newest = instance.get_run_records(dg.RunsFilter(**which, statuses=_ENDED), limit=1)
    since_then = instance.get_run_records(dg.RunsFilter(**which, statuses=_RED, updated_after=since), limit=1)
    red = [one.dagster_run for one in (*newest, *since_then) if one.dagster_run.status in _RED]
    return f"Run {red[0].run_id} of {red[0].job_name} failed." if red else None


def _of_failures(
    pipeline: type[Pipeline], by_window: Mapping[str, Counts] | Exception, options: Alerts
) -> Iterator[_Look]:
    name = pipeline.name
    if isinstance(by_window, Exception):  # of whatever storage the lake is on: the rest is looked at all the same
        yield _Look(name, "failures", "", f"Failures of {name} cannot be counted: {_kind(by_window)}.")
        return
    dead = sum(counts.dead for counts in by_window.values())
    # Without `retry` nothing retries a failure that was scheduled when the class had it.
    scheduled = sum(counts.scheduled for counts in by_window.values()) if pipeline.retry else 0
    waiting = sum(counts.open for counts in by_window.values()) - dead - scheduled
    yield _of_count(name, "failures", waiting, options.open_failures, "open and have no automatic retry")
    yield _of_count(name, "dead", dead, options.dead_failures, "dead")


def _of_count(name: str, about: About, count: int, allowed: int, state: str) -> _Look:
    wrong = f"{count:,} failures of {name} are {state}; {allowed:,} are allowed." if count > allowed else None
    return _Look(name, about, "", wrong, count)


def _of_source(name: str, producer: Producer, waiting: Backlog | Exception) -> Iterator[_Look]:
    if isinstance(waiting, Exception):  # how long messages wait is as it was
        known = isinstance(waiting, SourceError | ControlStoreError | TimeoutError)
        why = str(waiting) if known else _kind(waiting)
        problem = waiting.summary if isinstance(waiting, SourceError) else "does not answer"
        yield _Look(name, "source", producer.source, f"{producer.source} of {name} {problem}: {why}")
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
