"""Dead letters: what is dead goes to another source before the receive is forgotten, at least once."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from pydantic import PrivateAttr

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.message import Message
from pipeline_platform.model.retry import Retry
from pipeline_platform.run import dead_letters, steps
from pipeline_platform.run.clear_up import clear_up
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.contract import Patience, SourceError
from tests.fixtures.small_lake import Keeping, Memory, Run, visible

Letter = tuple[bytes, Mapping[str, Any] | None]


class Lettered(Keeping):
    """Sends on what is dead."""

    retry = Retry(max_attempts=2)
    dead_letters = "letters"

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.failed("no\x1b[31m\nhope", retry=False) if message.data == b"hopeless" else message.failed("")


class Letters(Memory):
    """Remembers what it was sent; refuses `poison`, and all while it is away."""

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
    """A flow without Spark, and receives that are decided in it."""

    def __init__(self, folder: Any) -> None:
        self.letters = Letters(name="letters")
        self.source = Memory(name="memory", deliveries_=())
        self.lake, control = Lake(root=str(folder / "lake")), ControlStore(f"sqlite:///{folder}/control.sqlite")
        self.log: list[str] = []
        self.flow = Flow(Lettered, self.source, self.lake, control, self._no_spark, dead_letters=self.letters)

    def _no_spark(self) -> Any:
        raise AssertionError("these few messages need no Spark")

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
def scene(tmp_path: Any) -> Scene:
    return Scene(tmp_path)


def test_what_is_dead_is_sent_with_what_is_said_of_it_and_nothing_else_is(scene: Scene) -> None:
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


def test_a_run_without_dead_messages_sends_nothing(scene: Scene) -> None:
    scene.letters._away = True

    answer = scene.acknowledge(scene.decided("r1", b"later"))

    assert (answer.letters, answer.errors, scene.left()) == (dead_letters.Letters(), [], [])


def test_what_cannot_be_sent_is_said_and_the_next_run_sends_it(scene: Scene) -> None:
    run = scene.decided("r1", b"hopeless", b"later")
    scene.letters._away = True

    answer = scene.acknowledge(run)

    assert (answer.letters.sent, answer.letters.unsent) == (0, 1)
    assert answer.errors == ["dead letters to letters: SourceError: letters: not now"]
    assert (answer.acknowledged, answer.unacknowledged) == (2, 0), "it is decided, and recorded as dead"
    assert [row["state"] for row in visible(run.tables, "failed")].count("dead") == 1

    assert clear_up(scene.flow, scene.log.append) == []
    assert scene.log == [
        "receive r1 is kept until its 1 dead letters are sent: dead letters to letters: SourceError: letters: not now"
    ]
    scene.letters._away = False
    assert clear_up(scene.flow, scene.log.append) == ["r1"]

    assert (scene.sent, scene.left()) == ([b"hopeless"], [])


def test_the_sensor_asks_for_a_run_that_sends_what_is_left(scene: Scene) -> None:
    run = scene.decided("r1", b"hopeless")
    scene.flow.control.claim("keeping", "r1", "run", wanted=1, capacity=10, lease_s=60)
    scene.letters._away = True

    scene.acknowledge(run)

    assert [claim.receive_id for claim in scene.flow.control.over("keeping")] == ["r1"]


@pytest.mark.parametrize("refused_at", [0, 3, 4, 11])
def test_what_was_sent_before_an_error_is_not_sent_again(
    scene: Scene, refused_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert clear_up(scene.flow, scene.log.append) == ["r1"]
    assert sorted(labels["message_id"] for _, labels in scene.letters._sent if labels) == sorted(
        f"r1-{number}" for number in range(12)
    )


def test_a_message_that_dies_of_its_last_attempt_is_sent_by_the_run_that_drove_it(scene: Scene) -> None:
    from pipeline_platform.lake.failed import FailedMessages

    run = scene.decided("r1", b"later")
    scene.acknowledge(run)
    assert scene.sent == []

    failures = FailedMessages(name="memory", lake=scene.lake, pipeline="keeping")
    again = Run(Tables(scene.lake, Lettered), failures, "r2", origin="failed").work().decide().publish()
    scene.letters._away = True
    assert scene.acknowledge(again).letters.unsent == 1
    assert scene.left() == ["r2"], "a backfill tells no source, and is kept all the same"
    scene.letters._away = False
    clear_up(scene.flow)

    ((payload, labels),) = scene.letters._sent
    assert (payload, labels and labels["attempts"]) == (b"later", "2")


def test_a_letter_that_another_receive_decided_is_not_sent_by_this_one(scene: Scene) -> None:
    deliveries = (("m", b"hopeless"),)
    first = Run(Tables(scene.lake, Lettered), Memory(deliveries_=deliveries), "r1").work()
    second = Run(Tables(scene.lake, Lettered), Memory(deliveries_=deliveries), "r2").work()
    scene.acknowledge(second.decide().publish())
    scene.acknowledge(first.decide().publish())

    assert scene.sent == [b"hopeless"]
