"""Alerts: each problem is posted to a real HTTP server once, and once more when it ends."""

import json
import sqlite3
import threading
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pipeline_platform import Retry
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED, Table
from pipeline_platform.orchestration import Alerts, platform_definitions
from pipeline_platform.orchestration.sensors import alerts
from pipeline_platform.source.backlog import Backlog
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.sensor import Asked, Place, tags
from tests.fixtures.small_lake import put

RED, GREEN = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS
WINDOW = "2025-03-01T0100"


class Webhook:
    """Webhook at a secret address that records alerts and answers with a status."""

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.status = 200
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                alert = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if webhook.status == 200:
                    webhook.posted.append({"path": self.path, **alert})
                self.send_response(webhook.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/hush"

    def texts(self) -> list[str]:
        """Return the texts of the alerts posted since the last call."""
        texts = [alert["text"] for alert in self.posted]
        self.posted.clear()
        return texts


@pytest.fixture
def webhook(monkeypatch):
    webhook = Webhook()
    thread = threading.Thread(target=webhook.server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("ALERTS_URL", webhook.address)
    yield webhook
    webhook.server.shutdown()
    webhook.server.server_close()
    thread.join()


POSTED = dg.EnvVar("ALERTS_URL")


@lru_cache(maxsize=4)
def defined(folder: Path, to: Any) -> dg.Definitions:
    """Return the definitions, built once for all ticks of a test."""
    return platform_definitions([Asked], resources_at(str(folder), "nowhere"), alerts=to)


def tick(place: Place, to: Any = POSTED, queue: TableQueue | None = None) -> str:
    """Evaluate a tick of the sensor with the cursor of the last tick, and return its skip reason."""
    definitions = defined(place.folder, to)
    lake = Lake(root=str(place.folder / "lake"))
    context = dg.build_sensor_context(
        instance=place.instance,
        cursor=place.cursor,
        resources={"queue": queue or place.queue, "control": place.control, "lake": lake},
        definitions=definitions,
    )
    told = definitions.resolve_sensor_def("alerts").evaluate_tick(context)
    place.cursor = told.cursor
    return str(told.skip_message)


def fail(place: Place, count: int, state: str = "open", first: int = 0, **more: Any) -> None:
    """Write events of messages, numbered from `first`: `open`, `dead` or `closed`."""
    table = Table(Lake(root=str(place.folder / "lake")), "asked", "failed", FAILED)
    table.ensure()
    event = {"source": "queue", "attempt": 1, "state": state, "at": datetime.now(UTC), "receive_id": "r", **more}
    ids = [{**event, "message_id": f"{number}"} for number in range(first, first + count)]
    put(table, f"{state}-{first}", *ids, window=WINDOW)


def away(place: Place) -> TableQueue:
    return TableQueue(name="queue", url=f"sqlite:///{place.folder}/elsewhere.sqlite")


def test_a_red_run_is_reported_once_and_once_that_a_later_one_is_green(place, webhook):
    assert tick(place) == "No problems found."
    red = place.queued(tags(5), RED)
    said = [tick(place), tick(place)]
    place.queued(tags(5), RED)
    tick(place)
    place.queued(tags(5), GREEN)
    tick(place), tick(place)

    failed = f"Run {red.run_id} of any failed."
    assert said == [failed, failed], "the tick shows it as long as it holds"
    first, over = webhook.posted
    about = {"path": "/hush", "pipeline": "asked", "about": "runs", "of": "source"}
    assert first == {**about, "text": failed, "since": first["since"], "over": False}
    assert over == {**about, "text": f"Resolved: {failed}", "since": first["since"], "over": True}


def test_a_red_run_between_two_ticks_is_reported_although_a_later_one_is_green(place, webhook):
    tick(place)
    red = place.queued(tags(5))
    place.instance.report_run_failed(red)
    place.queued(tags(5), GREEN)
    tick(place)
    assert webhook.texts() == [f"Run {red.run_id} of any failed."]
    tick(place), tick(place)
    assert webhook.texts() == [f"Resolved: Run {red.run_id} of any failed."]


def test_open_failures_are_reported_above_their_bound(place, webhook):
    bounded = Alerts(POSTED, open_failures=2)
    fail(place, 2)
    tick(place, bounded)
    assert webhook.texts() == []
    fail(place, 1, first=2)
    tick(place, bounded), tick(place, bounded)
    told = "asked has 3 open failures without an automatic retry, more than the allowed 2."
    assert webhook.texts() == [told]
    fail(place, 3, state="closed")
    tick(place, bounded)
    assert webhook.texts() == [f"Resolved: {told}"]


def test_dead_failures_have_a_bound_and_an_alert_of_their_own(place, webhook):
    bounded = Alerts(POSTED, open_failures=66, dead_failures=1)
    fail(place, 66)
    fail(place, 1, "dead", first=100)
    tick(place, bounded)
    assert webhook.posted == []
    fail(place, 1, "dead", first=101)
    tick(place, bounded)
    assert [(alert["about"], alert["text"]) for alert in webhook.posted] == [
        ("dead", "asked has 2 dead failures, more than the allowed 1.")
    ]


def test_failures_that_wait_for_an_automatic_retry_are_reported_once_they_are_dead(place, webhook, monkeypatch):
    monkeypatch.setattr(Asked, "retry", Retry(max_attempts=2))
    fail(place, 3, due_at=datetime.now(UTC))
    tick(place)
    assert webhook.posted == []
    fail(place, 3, "dead", attempt=2)
    tick(place)
    assert [alert["about"] for alert in webhook.posted] == ["dead"]


def test_failures_whose_retry_the_class_has_lost_are_reported(place, webhook):
    fail(place, 3, due_at=datetime.now(UTC))
    tick(place)
    assert [alert["about"] for alert in webhook.posted] == ["failures"]


def test_growth_is_reported_at_once_if_it_doubles_and_else_after_a_time(place, webhook, monkeypatch):
    def dead() -> list[int]:
        tick(place)
        return [int(text.split()[2]) for text in webhook.texts()]

    fail(place, 10, "dead")
    assert (dead(), dead()) == ([10], [])
    fail(place, 5, "dead", first=10)
    assert dead() == []
    fail(place, 5, "dead", first=15)
    assert (dead(), dead()) == ([20], []), "twice as many"
    fail(place, 1, "dead", first=20)
    monkeypatch.setattr(alerts, "_AGAIN_AFTER", timedelta(0))
    assert (dead(), dead()) == ([21], []), "the time is over"
    fail(place, 20, "closed")
    assert dead() == []
    fail(place, 1, "dead", first=30)
    assert dead() == [2], "more than the fewest since the last alert"


def test_a_backlog_that_is_too_old_stays_reported_while_its_source_does_not_answer(place, webhook):
    place.enqueue(1)
    with sqlite3.connect(place.folder / "queue.sqlite") as database:
        database.execute("UPDATE messages SET created_at = datetime(created_at, '-1 hour')")
    tick(place)
    (text,) = webhook.texts()
    assert text.startswith("queue of asked: The oldest message has waited 3,60")
    tick(place, queue=away(place)), tick(place, queue=away(place))
    (unanswered,) = webhook.texts()
    assert unanswered.startswith("queue of asked cannot be used: ")
    place.queue.plan(1, 1, "somebody")
    tick(place)
    assert webhook.texts() == [f"Resolved: {unanswered}", f"Resolved: {text}"]


def test_a_loss_is_reported_although_the_wait_before_it_was_reported(place, webhook):
    class Retained(TableQueue):
        lost: str = ""

        def backlog(self) -> Backlog:
            return Backlog(1, datetime.now(UTC) - timedelta(hours=1), lost=self.lost)

    queue = Retained(name="queue", url=place.queue.url)
    tick(place, queue=queue)
    assert [alert["about"] for alert in webhook.posted] == ["backlog"]
    webhook.posted.clear()

    retained = queue.model_copy(update={"lost": "offsets 3 to 8"})
    tick(place, queue=retained), tick(place, queue=retained)

    (loss,) = webhook.posted
    assert (loss["about"], loss["of"], loss["text"]) == (
        "lost",
        "queue",
        "queue of asked lost messages: offsets 3 to 8",
    )


def test_open_failures_are_reported_after_an_outage_of_the_lake_and_stay_reported_in_the_next(
    place, webhook, monkeypatch
):
    def outage(_: FailedMessages) -> None:
        raise TimeoutError

    fail(place, 3)
    uncounted = "Could not count the failures of asked: TimeoutError."
    failures = "asked has 3 open failures without an automatic retry, more than the allowed 0."
    with monkeypatch.context() as patch:
        patch.setattr(FailedMessages, "by_window", outage)
        tick(place)
    assert webhook.texts() == [uncounted]
    tick(place)
    assert webhook.texts() == [f"Resolved: {uncounted}", failures]
    with monkeypatch.context() as patch:
        patch.setattr(FailedMessages, "by_window", outage)
        tick(place)
    tick(place)
    assert webhook.texts() == [uncounted, f"Resolved: {uncounted}"]


def test_what_a_webhook_refuses_is_sent_by_a_later_tick_and_no_log_has_its_address(place, webhook, caplog, capfd):
    place.queued(tags(5), RED)
    webhook.status = 500
    refused = tick(place)
    webhook.status = 200
    tick(place)
    assert refused.startswith("Could not send alerts (HTTP status 500). The next tick tries again. Run ")
    assert len(webhook.texts()) == 1
    assert "hush" not in f"{refused}{place.cursor}{caplog.text}{capfd.readouterr()}"


def test_a_function_gets_alerts_and_one_that_raises_gets_them_again(place):
    got: list[Any] = []

    def page(alert: Any) -> None:
        got.append(alert)
        if len(got) == 1:
            raise ConnectionError("https://user:hush@pager")

    place.queued(tags(5), RED)
    refused = tick(place, page)
    tick(place, page), tick(place, page)
    assert [(alert.about, alert.over) for alert in got] == [("runs", False)] * 2
    assert "ConnectionError" in refused
    assert "hush" not in refused


def test_a_lake_that_does_not_answer_in_time_holds_up_no_alert_and_none_is_sent_twice(place, webhook, monkeypatch):
    """Dagster allows a tick one minute; an unavailable bucket takes two minutes to time out."""
    answers = threading.Event()
    monkeypatch.setattr(FailedMessages, "by_window", lambda _: answers.wait(30) and {})
    monkeypatch.setattr(alerts, "_LOOKS_WITHIN_S", 0.2)
    red = place.queued(tags(5), RED)
    tick(place), tick(place)
    answers.set()
    assert webhook.texts() == [
        f"Run {red.run_id} of any failed.",
        "Could not count the failures of asked: TimeoutError.",
    ]


def test_alerts_that_take_too_long_to_send_are_left_to_the_next_tick(place, webhook, monkeypatch):
    place.queued(tags(5), RED)
    fail(place, 1)
    monkeypatch.setattr(alerts, "_SENDS_WITHIN_S", -1.0)
    late = tick(place)
    monkeypatch.setattr(alerts, "_SENDS_WITHIN_S", 45.0)
    assert webhook.texts() == []
    assert late.startswith("Some alerts were not sent within ")
    tick(place)
    assert len(webhook.texts()) == 2


def test_a_source_that_raises_what_it_should_not_is_reported_without_its_words_and_the_rest_is_looked_at(
    place, webhook
):
    class Odd(TableQueue):
        def backlog(self) -> Backlog:
            raise ConnectionError("amqp://user:hush@broker")

    red = place.queued(tags(5), RED)
    tick(place, queue=Odd(name="queue", url=place.queue.url))
    assert webhook.texts() == [f"Run {red.run_id} of any failed.", "queue of asked does not answer: ConnectionError"]


@pytest.mark.parametrize("cursor", ["no JSON", "[]", '{"wrong": {"asked runs source": 1}}'])
def test_a_cursor_that_cannot_be_read_is_a_first_look(place, webhook, cursor):
    red = place.queued(tags(5), RED)
    place.cursor = cursor
    tick(place), tick(place)
    assert webhook.texts() == [f"Run {red.run_id} of any failed."]


def test_a_variable_that_is_not_set_is_named(place, monkeypatch):
    monkeypatch.delenv("ALERTS_URL", raising=False)
    with pytest.raises(ValueError, match="ALERTS_URL is not set"):
        tick(place)


def test_without_alerts_there_is_no_sensor(place):
    definitions = platform_definitions([Asked], resources_at(str(place.folder), "nowhere"))
    assert "alerts" not in {sensor.name for sensor in definitions.sensors or ()}
