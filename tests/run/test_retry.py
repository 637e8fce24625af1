"""Failures retried by whole runs until they are dead, and dead letters sent to another source at least once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import PrivateAttr

from pipeline_platform import Message, PipelineError, Retry, SourceError
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.lake.tables import Tables
from pipeline_platform.run import dead_letters, steps
from pipeline_platform.run.finish import finish, finish_others
from pipeline_platform.run.intake import intake_of
from pipeline_platform.source.pauses import Patience
from tests.fixtures.flow import begun, flow_of, run
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.small_lake import Keeping, Memory, Run, visible

Letter = tuple[bytes, Mapping[str, Any] | None]


class Lettered(Keeping):
    """A pipeline that sends dead letters."""

    retry = Retry(max_attempts=2)
    dead_letters = "letters"

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.failed("no\x1b[31m\nhope", retry=False) if message.data == b"hopeless" else message.failed("")


class Letters(Memory):
    """A source that records sent messages; it refuses `poison`, and all messages while it is unavailable."""

    _sent: list[Letter] = PrivateAttr(default_factory=list)
    _away: bool = PrivateAttr(False)

    @property
    def patience(self) -> Patience:
        return Patience("stop")

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        sent = [*zip(payloads, metadata or [], strict=True)]
        if self._away or any(payload == b"poison" for payload, _ in sent):
            raise SourceError("letters: not now")
        self._sent += sent
        return len(sent)


class Scene:
    """A flow without Spark, with decided receives."""

    def __init__(self, folder: Any) -> None:
        self.letters = Letters(name="letters")
        self.source = Memory(name="memory", deliveries_=())
        self.log: list[str] = []
        self.flow = flow_of(folder, Lettered, self.source, dead_letters=self.letters)
        self.lake = self.flow.lake

    def decided(self, receive_id: str, *payloads: bytes) -> Run:
        deliveries = tuple((f"{receive_id}-{number}", payload) for number, payload in enumerate(payloads))
        return Run(Tables(self.lake, Lettered), Memory(deliveries_=deliveries), receive_id).work().decide().publish()

    def acknowledge(self, run: Run) -> steps.Acknowledgement:
        return steps.acknowledge(self.flow, run.receive)

    @property
    def sent(self) -> list[bytes]:
        return [payload for payload, _ in self.letters._sent]

    def left(self) -> list[str]:
        return self.flow.ledger.unfinished()


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_what_is_dead_is_sent_with_what_is_said_of_it_and_nothing_else_is(scene):
    answer = scene.acknowledge(scene.decided("r1", b"hopeless", b"later"))

    ((payload, labels),) = scene.letters._sent
    assert payload == b"hopeless"
    assert labels == {
        "pipeline": "keeping",
        "source": "memory",
        "message_id": "r1-0",
        "stage": "handle_message",
        "kind": "failed",
        "reason": "no [31m hope",
        "attempts": "1",
    }
    assert (answer.letters.sent, answer.letters.unsent, answer.acknowledged) == (1, 0, 2)
    assert scene.left() == []


def test_a_run_without_dead_messages_sends_nothing(scene):
    scene.letters._away = True
    answer = scene.acknowledge(scene.decided("r1", b"later"))
    assert (answer.letters, answer.errors, scene.left()) == (dead_letters.Letters(), [], [])


def test_what_cannot_be_sent_is_said_and_the_next_run_sends_it(scene):
    run = scene.decided("r1", b"hopeless", b"later")
    scene.letters._away = True

    answer = scene.acknowledge(run)

    assert (answer.letters.sent, answer.letters.unsent) == (0, 1)
    assert answer.errors == ["dead letters to letters: SourceError: letters: not now"]
    assert (answer.acknowledged, answer.unacknowledged) == (2, 0), "it is decided, and recorded as dead"
    assert [row["state"] for row in visible(run.tables, "failed")].count("dead") == 1

    assert finish_others(scene.flow, scene.log.append) == []
    why = "dead letters to letters: SourceError: letters: not now"
    assert [("receive r1 " in line, line.endswith(why)) for line in scene.log] == [(True, True)]
    scene.letters._away = False
    assert finish_others(scene.flow, scene.log.append) == ["r1"]

    assert (scene.sent, scene.left()) == ([b"hopeless"], [])


def test_the_sensor_asks_for_a_run_that_sends_what_is_left(scene):
    run = scene.decided("r1", b"hopeless")
    scene.flow.control.claim("keeping", "r1", "run", wanted=1, capacity=10, lease_s=60)
    scene.letters._away = True
    scene.acknowledge(run)
    assert [claim.receive_id for claim in scene.flow.control.over("keeping")] == ["r1"]


@pytest.mark.parametrize("refused_at", [0, 3, 4, 11])
def test_what_was_sent_before_an_error_is_not_sent_again(scene, refused_at, monkeypatch):
    monkeypatch.setattr(dead_letters, "AT_ONCE", 4)
    run = scene.decided("r1", *[b"hopeless"] * 12)
    send: Callable[..., int] = Letters.send

    def refuse(letters: Letters, payloads: list[bytes], metadata: Any) -> int:
        if len(letters._sent) + len(payloads) > refused_at:
            raise SourceError("letters: full")
        return send(letters, payloads, metadata)

    with monkeypatch.context() as full:
        full.setattr(Letters, "send", refuse)
        answer = scene.acknowledge(run)
    before = len(scene.sent)

    assert (answer.letters.sent, answer.letters.unsent) == (before, 12 - before)
    assert before == refused_at // 4 * 4
    assert finish_others(scene.flow, scene.log.append) == ["r1"]
    assert sorted(labels["message_id"] for _, labels in scene.letters._sent if labels) == sorted(
        f"r1-{number}" for number in range(12)
    )


@pytest.mark.parametrize("finishes_again", [finish, lambda flow, receive: finish_others(flow)])
def test_letters_that_another_process_has_sent_are_not_sent_again(scene, finishes_again, monkeypatch):
    monkeypatch.setattr(dead_letters, "AT_ONCE", 1)
    run, limits = scene.decided("r1", *[b"hopeless"] * 4), [1]
    send: Callable[..., int] = Letters.send

    def refuse(letters: Letters, payloads: list[bytes], metadata: Any) -> int:
        if len(letters._sent) == limits[-1]:
            raise SourceError("letters: full")
        return send(letters, payloads, metadata)

    monkeypatch.setattr(Letters, "send", refuse)
    assert not finish(scene.flow, run.receive)
    limits.append(3)
    assert not finish(replace(scene.flow), run.receive)
    limits.append(5)
    assert finishes_again(scene.flow, run.receive)
    assert (len(scene.sent), scene.left()) == (4, [])


def test_a_message_that_dies_of_its_last_attempt_is_sent_by_the_run_that_drove_it(scene):
    run = scene.decided("r1", b"later")
    scene.acknowledge(run)
    assert scene.sent == []

    failures = FailedMessages(name="memory", lake=scene.lake, pipeline="keeping")
    again = Run(Tables(scene.lake, Lettered), failures, "r2", origin="failed").work().decide().publish()
    scene.letters._away = True
    assert scene.acknowledge(again).letters.unsent == 1
    assert scene.left() == ["r2"], "a backfill tells no source, and is kept all the same"
    scene.letters._away = False
    finish_others(scene.flow)

    ((payload, labels),) = scene.letters._sent
    assert (payload, labels and labels["attempts"]) == (b"later", "2")


def test_a_letter_that_another_receive_decided_is_not_sent_by_this_one(scene):
    deliveries = (("m", b"hopeless"),)
    first = Run(Tables(scene.lake, Lettered), Memory(deliveries_=deliveries), "r1").work()
    second = Run(Tables(scene.lake, Lettered), Memory(deliveries_=deliveries), "r2").work()
    scene.acknowledge(second.decide().publish())
    scene.acknowledge(first.decide().publish())
    assert scene.sent == [b"hopeless"]


DUE = Selection(state="due")
SOON = Selection(state="due", due_by=datetime.now(UTC) + timedelta(days=1))
SEVERAL = Selection(failed_before=datetime.now(UTC) + timedelta(days=1))


class Soon(Obedient):
    """Failures are due within a second, and retried once."""

    name = "soon"
    retry = Retry(max_attempts=2, backoff=timedelta(microseconds=1))


def test_what_a_run_goes_by_is_in_its_record(filled):
    flow = filled(Soon, [b"raise"])
    run(flow)
    receive = begun(flow, origin="failed", selection=SOON)
    assert receive.selection == SOON
    assert flow.ledger.get(receive.receive_id) == receive
    later = begun(flow, origin="failed", selection=DUE)
    assert later.selection.due_by is not None, "each later look finds the same failures due"


@pytest.mark.parametrize(
    ("selection", "left"),
    [(Selection(), 2), (Selection(kind="ValueError"), 2), (SOON, 0), (SEVERAL, 0)],
    ids=["all", "kind", "due", "in several runs"],
)
def test_a_run_retries_the_failures_without_capacity_later_unless_another_run_is_requested(filled, selection, left):
    flow = filled(Soon, [b"raise", b"raise", b"raise"])
    run(flow)
    receive = begun(flow, origin="failed", selection=selection).model_copy(update={"demand": 1, "asked": 3})
    assert intake_of(flow, receive).left(receive) == left


@pytest.mark.parametrize("origin", ["source", "messages"])
def test_a_selection_is_refused_where_no_failures_are_driven(filled, origin):
    flow = filled(Soon, [b"raise"])
    with pytest.raises(PipelineError, match="`failures` of the run config is for retries"):
        begun(flow, origin=origin, selection=DUE)
