"""`ack_immediately` in tasks: each message is acknowledged early once; refusals are retried at the end of the run."""

import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from pipeline_platform import Message, Pipeline, Processors, Refused, SourceError, ack_immediately
from pipeline_platform.lake.decisions.early_acks import Notes
from pipeline_platform.lake.decisions.ledger import Ledger, Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.tasks.handle.handle_messages import Handle
from tests.fixtures.early import Early, Together
from tests.fixtures.small_lake import (
    DRIVEN_AGAIN,
    WINDOW,
    Memory,
    batch_of,
    done,
    handled,
    numbered,
    outcomes,
    ranges,
    received,
    rows_of,
)
from tests.tasks.test_permits import Stopped


class Moody(Memory):
    """Refuses some ids, or is unavailable."""

    refuses: tuple[str, ...] = ()
    away: bool = False

    def ack(self, ack_ref, ack_ids):
        super().ack(ack_ref, ack_ids)
        if self.away:
            raise SourceError("no answer")
        return [Refused(ack_id, "not now") for ack_id in ack_ids if ack_id in self.refuses]


@pytest.fixture
def lake(tmp_path):
    lake = Lake(root=str(tmp_path))
    for name in ("early", "together"):
        receive = {"receive_id": "r1", "pipeline": name, "origin": "source", "run_id": "run", "windows": (WINDOW,)}
        Ledger(lake, name).begin(Receive(**receive, demand=9, base=0, started_at=datetime.now(UTC)))
    return lake


def early(lake: Lake, pipeline: type[Pipeline], source: Memory, careful: bool = False, **options: Any) -> Manifest:
    """Receive and handle all messages of a source that tasks may acknowledge early."""
    name = pipeline.name
    rows = ranges(received(lake, name, source), name)
    step = {"context": None, "ack_policy": source.ack_policy, "lake": lake, "receive_id": "r1"}
    return done(Handle(pipeline=pipeline, parts=[rows], source=source, **step, **options), careful=careful)


def actions(lake: Lake, manifest: Any, pipeline: str = "early") -> list[str]:
    return [row["action"] for row in rows_of(lake, pipeline, manifest, "outcomes")]


def test_a_chunk_is_told_in_one_call_by_status(lake):
    source = Memory(deliveries_=numbered(b"1", b"bad", b"2"), on_failure="nack:5")
    manifest = early(lake, Together, source)
    assert sorted(source.told) == [("ack", "q", ["ack-m0", "ack-m2"]), ("nack:5", "q", ["ack-m1"])]
    assert actions(lake, manifest, "together") == ["acknowledged early"] * 3
    assert outcomes(lake, "together", manifest) == {"m0": "handled", "m1": "returned", "m2": "handled"}


def test_threads_acknowledge_each_message_once(lake):
    class AtOnce(Early):
        name = "early"
        processors = Processors(threads=4)

    source = Memory(deliveries_=numbered(*(b"early %d" % number for number in range(40))))

    manifest = early(lake, AtOnce, source)

    assert sorted(ack_id for _, _, ids in source.told for ack_id in ids) == sorted(
        f"ack-m{number}" for number in range(40)
    )
    assert actions(lake, manifest) == ["acknowledged early"] * 40


def test_early_acks_of_a_crashed_process_are_not_repeated(lake):
    source = Memory(deliveries_=numbered(b"early kill", b"early", b"plain"))
    manifest = early(lake, Early, source, careful=True)
    noted = Notes(lake, "early", "r1").read()
    assert sorted(noted) == [("q", "ack-m0"), ("q", "ack-m1")]
    by_id = {row["message_id"]: (row["outcome"], row["action"]) for row in rows_of(lake, "early", manifest, "outcomes")}
    assert by_id == {
        "m0": ("failed", "acknowledged early"),
        "m1": ("handled", "acknowledged early"),
        "m2": ("handled", "ack"),
    }


def test_a_task_that_is_tried_again_handles_again_and_tells_nothing_twice(lake):
    source = Memory(deliveries_=numbered(b"early"))
    early(lake, Early, source)
    manifest = early(lake, Early, source)
    assert source.told == [("ack", "q", ["ack-m0"])]
    assert (outcomes(lake, "early", manifest), actions(lake, manifest)) == ({"m0": "handled"}, ["acknowledged early"])


def test_refused_early_acks_are_retried_at_the_end_and_logged_once(lake, caplog):
    source = Moody(deliveries_=numbered(b"early 1", b"early 2", b"early 3"), refuses=("ack-m0", "ack-m1"))
    with caplog.at_level(logging.WARNING):
        manifest = early(lake, Early, source)
    assert actions(lake, manifest) == ["ack", "ack", "acknowledged early"]
    (record,) = caplog.records
    assert record.getMessage().endswith("ack-m0: not now")
    assert list(Notes(lake, "early", "r1").read()) == [("q", "ack-m2")], "the source knows the others"


def test_uncertain_early_acks_are_retried_at_the_end_and_stay_noted(lake):
    source = Moody(deliveries_=numbered(b"early"), away=True)
    manifest = early(lake, Early, source)
    assert actions(lake, manifest) == ["ack"]
    (entry,) = Notes(lake, "early", "r1").read().values()
    assert not entry.certain, "if the run crashes, the source may have deleted it"


@pytest.mark.parametrize("gone", ["given up", "finished"])
def test_a_released_receive_sends_no_early_acks(lake, gone):
    source = Memory(deliveries_=numbered(b"early"))
    if gone == "given up":
        Notes(lake, "early", "r1").close()
    else:
        Ledger(lake, "early").remove("r1")
    manifest = early(lake, Early, source)
    assert source.told == []
    (failed,) = rows_of(lake, "early", manifest, "failed")
    assert failed["reason"].startswith("receive r1: fenced")


@pytest.mark.parametrize("careful", [False, True])
def test_unstarted_messages_that_were_acknowledged_early_fail(lake, careful):
    source = Memory(deliveries_=numbered(b"1", b"2"))
    manifest = early(lake, Together, source, careful=careful, pace=Stopped(1))
    found = outcomes(lake, "together", manifest)
    told = {ack_id for _, ack_id in Notes(lake, "together", "r1").read()}
    assert found["m0"] == "handled"
    assert found["m1"] == ("failed" if "ack-m1" in told else "returned")
    assert careful or "ack-m1" in told


def test_a_retry_sends_no_early_acks(lake):
    manifest = handled(lake, Early, b"early", ack_policy=DRIVEN_AGAIN)
    assert actions(lake, manifest) == ["ack"]


def test_ack_immediately_accepts_messages_or_an_empty_list():
    (message,) = Message.each(batch_of(b"1"))
    assert ack_immediately([]) == []
    with pytest.raises(TypeError, match="requires messages, got bytes"):
        ack_immediately([b"1"])
    with pytest.raises(RuntimeError, match="acks_immediately = True"):
        ack_immediately([message])
