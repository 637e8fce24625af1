"""A pipeline's own `acknowledge`: notified of decided messages before the source, group by group."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from pipeline_platform import Message, Pipeline, Processors, Producer, Share, TableBatcher
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run import notifying, steps
from pipeline_platform.run.finish import finish_others
from pipeline_platform.run.flow import Flow
from tests.fixtures.faults import fault
from tests.fixtures.flow import WINDOW, finish, flow_of, handled, publish, rows, run
from tests.fixtures.flow_pipelines import Place, Word
from tests.fixtures.small_lake import Memory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Heard = list[dict[str, Any]]


class Base(Pipeline, abstract=True):
    """A pipeline that records outcomes in a file for each call."""

    producer = Producer(source="queue")
    processors = Processors(concurrency=2, max_demand=5_000)
    batchers = {"words": TableBatcher(schema=Word)}
    context = Place()

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Place) -> None:
        """Record the call, or raise if a file says so."""
        refusal = Path(context.folder, "refuse")
        how, _, whom = refusal.read_text().partition(" ") if refusal.exists() else ("", "", "")
        if whom in (ack_ref, "all") and (how != "kill" or any(message.data == b"0" for message in successful)):
            fault(how)
        told = {
            "ack_ref": ack_ref,
            "successful": [(message.data or b"").decode() for message in successful],
            "failed": [[message.data.decode(), message.reason, message.batcher] for message in failed],
            "source": Path(context.folder, "acknowledged").exists(),
        }
        Path(context.folder, f"call-{os.urandom(8).hex()}").write_text(json.dumps(told))


class Marking(Base):
    """The same, message by message."""

    name = "marking"

    def handle_message(self, message: Message, context: Place) -> Message:
        fault(message.data.decode())
        return message.put_batcher("words").put_data(Word(word=message.data.decode().upper()))


class Impatient(Marking):
    """A pipeline with a time limit."""

    name = "impatient"
    processors = Processors(concurrency=2, message_timeout=timedelta(seconds=0.5))


class ImpatientColumns(Base):
    """A pipeline with a time limit in the Spark lane."""

    name = "impatient_columns"
    processors = Impatient.processors

    def handle_messages(self, messages: "DataFrame", context: Place) -> "DataFrame":
        from pyspark.sql import functions as f

        return messages.withColumns({"word": f.col("data").cast("string"), "batcher": f.lit("words")})


LATE = "acknowledge took longer than 3 times processors.message_timeout (1.5 s) allows"


class Groups(Memory):
    """A source with two alternating groups that writes a file when it is acknowledged."""

    folder: str = ""

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        ids = [message_id for message_id, _ in self.deliveries_]
        yield self.deliveries(
            message_id=ids,
            data=[data for _, data in self.deliveries_],
            ack_id=[f"ack-{message_id}" for message_id in ids],
            ack_ref=["a" if place % 2 == 0 else "b" for place in range(len(ids))],
        )

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Any]:
        Path(self.folder, "acknowledged").touch()
        return super().ack(ack_ref, ack_ids)


def calls(folder: Path) -> Heard:
    return [json.loads(path.read_text()) for path in folder.glob("call-*")]


def heard(folder: Path) -> list[str]:
    """Return all data that `acknowledge` was notified of, sorted."""
    each = calls(folder)
    successful = [data for call in each for data in call["successful"]]
    return sorted(successful + [data for call in each for data, *_ in call["failed"]])


def acknowledged(flow: Flow) -> list[str]:
    """Return all ids that were acknowledged at the source, sorted."""
    assert isinstance(flow.source, Groups)
    return sorted(message_id for _, _, ids in flow.source.told for message_id in ids)


@pytest.fixture
def groups(tmp_path, tasks_here, spark_session):
    """A flow over messages of two groups; Spark starts for the Spark lane only."""
    deliveries = tuple((f"m{number}", b"%d" % number) for number in range(6))
    source = Groups(name="queue", deliveries_=deliveries, folder=str(tmp_path))
    return flow_of(tmp_path, Marking, source, session=spark_session)


def test_it_is_told_once_of_each_message_as_it_was_delivered_and_how_it_ended(filled, tmp_path):
    flow = filled(Marking, [b"one", b"raise", b"two"])
    run(flow, context={"folder": str(tmp_path)})
    told = calls(tmp_path)
    assert sorted(message for call in told for message in call["successful"]) == ["one", "two"]
    ((data, reason, _),) = [message for call in told for message in call["failed"]]
    assert (data, reason.removeprefix("ValueError: ")) == ("raise", "as told")
    assert flow.source.backlog().messages == 0
    assert flow.ledger.unfinished() == []


def test_it_hears_before_the_source_each_group_in_order(groups, tmp_path):
    run(groups, context={"folder": str(tmp_path)})
    told = {call["ack_ref"]: call for call in calls(tmp_path)}
    assert told["a"]["successful"] == ["0", "2", "4"]
    assert told["b"]["successful"] == ["1", "3", "5"]
    assert not told["a"]["source"]
    assert not told["b"]["source"]
    assert acknowledged(groups) == [f"ack-m{number}" for number in range(6)]


def test_where_it_raises_the_source_is_not_told_of_that_group_and_the_next_run_tells_both(groups, tmp_path):
    (tmp_path / "refuse").write_text("raise a")
    receive = handled(groups, context={"folder": str(tmp_path)})
    answer = finish(groups, receive)

    assert (answer.acknowledged, answer.unacknowledged) == (3, 3)
    assert answer.errors == ["acknowledge of 3 messages of a: ValueError: as told"]
    assert acknowledged(groups) == ["ack-m1", "ack-m3", "ack-m5"]
    assert heard(tmp_path) == ["1", "3", "5"]
    assert [claim.receive_id for claim in groups.control.over("marking")] == [receive.receive_id], "the sensor sees it"

    log: list[str] = []
    reported: list[Receive] = []
    finish_others(groups, log.append, reported.append)
    why = "acknowledge of 3 messages of a: ValueError: as told"
    assert [(receive.receive_id in line, line.endswith(why)) for line in log] == [(True, True)]
    assert [claim.receive_id for claim in groups.control.over("marking")] == [receive.receive_id]

    (tmp_path / "refuse").unlink()
    assert finish_others(groups, log.append, reported.append) == [receive.receive_id]
    assert reported == [], "its own run has reported it"
    assert heard(tmp_path) == ["0", "1", "2", "3", "4", "5"], "each once"
    assert {*acknowledged(groups)} == {f"ack-m{number}" for number in range(6)}
    assert groups.ledger.unfinished() == groups.control.over("marking") == []


def test_a_message_that_comes_again_meanwhile_is_not_acknowledged_before_it_is_heard(filled, tmp_path):
    flow = filled(Marking, [b"one", b"two"])
    (tmp_path / "refuse").write_text("raise all")
    first = handled(flow, context={"folder": str(tmp_path)})
    finish(flow, first)
    flow.source.abandon(first.receive_id, list)  # its lease is over

    finish(flow, again := handled(flow, context={"folder": str(tmp_path)}))

    assert again.demand
    assert heard(tmp_path) == []
    assert first.receive_id in flow.ledger.unfinished()
    flow.source.abandon(again.receive_id, list)
    assert flow.source.backlog().messages == 2, "nothing is acknowledged"
    (tmp_path / "refuse").unlink()
    run(flow, context={"folder": str(tmp_path)})
    assert heard(tmp_path) == ["one", "two"]
    assert flow.source.backlog().messages == 0
    assert sorted(rows(flow, "words")["word"]) == ["ONE", "TWO"]


@pytest.mark.parametrize(
    ("pipeline", "how", "why"),
    [
        (Marking, "kill", "acknowledge ended the worker (signal 9)"),
        (Impatient, "hang", LATE),
        (ImpatientColumns, "hang", LATE),
    ],
)
def test_one_that_kills_its_worker_or_hangs_costs_its_own_messages_alone(groups, tmp_path, pipeline, how, why):
    flow = replace(groups, producer=BoundProducer(pipeline))
    (tmp_path / "refuse").write_text(f"{how} a")
    receive = handled(flow, context={"folder": str(tmp_path)})
    answer = finish(flow, receive)
    assert answer.errors == [f"acknowledge of 3 messages of a: {why}"]
    assert set(heard(tmp_path)) == {"1", "3", "5"}
    assert (answer.acknowledged, answer.unacknowledged) == (3, 3)
    (tmp_path / "refuse").unlink()
    assert finish_others(flow) == [receive.receive_id]
    assert heard(tmp_path) == ["0", "1", "2", "3", "4", "5"], "each once"


def test_a_run_that_dies_before_it_is_written_down_tells_again_and_one_that_dies_after_does_not(
    groups, tmp_path, monkeypatch
):
    receive = handled(groups, context={"folder": str(tmp_path)})
    publish(groups, receive)

    with monkeypatch.context() as dying:
        dying.setattr(groups.ledger, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            steps.acknowledge(groups, receive)
    assert (len(calls(tmp_path)), acknowledged(groups)) == (2, [])
    with monkeypatch.context() as dying:
        dying.setattr(steps, "AcknowledgeOutcomes", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            steps.acknowledge(groups, receive)
    assert (len(calls(tmp_path)), acknowledged(groups)) == (4, [])

    steps.acknowledge(groups, receive)

    assert len(calls(tmp_path)) == 4
    assert acknowledged(groups) == [f"ack-m{number}" for number in range(6)]


def test_a_backfill_and_a_replay_acknowledge_nothing(filled, tmp_path):
    flow = filled(Marking, [b"one", b"raise"])
    run(flow, context={"folder": str(tmp_path)})
    run(flow, "failed", context={"folder": str(tmp_path)})
    run(flow, "messages", context={"folder": str(tmp_path)})
    assert heard(tmp_path) == ["one", "raise"]


def test_a_pipeline_without_one_asks_nothing_of_spark(filled, monkeypatch):
    class Plain(Marking):
        name = "plain"
        acknowledge = Pipeline.acknowledge

    flow = filled(Plain, [b"one"])
    monkeypatch.setattr(notifying, "NotifyAuthor", None)

    assert run(flow).windows == (WINDOW,)
    assert flow.ledger.unfinished() == []


def test_thousands_are_told_a_thousand_at_a_time(filled, tmp_path):
    flow = filled(Marking, [b"%d" % number for number in range(1_200)])
    run(flow, context={"folder": str(tmp_path)})
    assert max(len(call["successful"]) for call in calls(tmp_path)) <= 1_000
    assert sorted(map(int, heard(tmp_path))) == list(range(1_200))
