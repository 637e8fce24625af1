"""`ack_immediately` in tasks: noted, told, once; what the source refuses is told at the end."""

import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from pipeline_platform import Message, Pipeline, Processors, Refused, SourceError, ack_immediately
from pipeline_platform.lake.early_acks import Notes
from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.tasks.handle.handle_messages import Handle
from tests.fixtures.early import Early, Together
from tests.fixtures.obedient import Obedient
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
    """Refuses some ids, or is away."""

    refuses: tuple[str, ...] = ()
    away: bool = False

    def ack(self, ack_ref, ack_ids):
        super().ack(ack_ref, ack_ids)
        if self.away:
            raise SourceError("no answer")
        return [Refused(one, "not now") for one in ack_ids if one in self.refuses]


@pytest.fixture
def lake(tmp_path):
    lake = Lake(root=str(tmp_path))
    for name in ("early", "together"):
        receive = {"receive_id": "r1", "pipeline": name, "origin": "source", "run_id": "run", "windows": (WINDOW,)}
        Ledger(lake, name).begin(Receive(**receive, demand=9, base=0, started_at=datetime.now(UTC)))
    return lake


def early(lake: Lake, pipeline: type[Pipeline], source: Memory, careful: bool = False, **options: Any) -> Manifest:
    """Receive and handle all that a source has; tasks may tell it."""
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
    assert actions(lake, manifest, "together") == ["told early"] * 3
    assert outcomes(lake, "together", manifest) == {"m0": "handled", "m1": "returned", "m2": "handled"}


@pytest.mark.parametrize("careful", [False, True])
def test_whatever_comes_later_nothing_is_told_twice_and_no_failure_is_lost(lake, careful):
    source = Memory(deliveries_=numbered(b"early", b"early raise", b"early return"))
    manifest = early(lake, Early, source, careful=careful)
    assert set(actions(lake, manifest)) == {"told early"}
    assert outcomes(lake, "early", manifest) == {"m0": "handled", "m1": "failed", "m2": "failed"}
    assert len(rows_of(lake, "early", manifest, "failed")) == 2
    if not careful:  # a fork's calls are its own
        assert source.told == [("ack", "q", [f"ack-m{number}"]) for number in range(3)]


def test_threads_tell_of_each_message_once(lake):
    class AtOnce(Early):
        name = "early"
        processors = Processors(threads=4)

    source = Memory(deliveries_=numbered(*(b"early %d" % number for number in range(40))))

    manifest = early(lake, AtOnce, source)

    assert sorted(one for _, _, ids in source.told for one in ids) == sorted(f"ack-m{number}" for number in range(40))
    assert actions(lake, manifest) == ["told early"] * 40


def test_what_a_dead_fork_told_is_not_told_again(lake):
    source = Memory(deliveries_=numbered(b"early die", b"early", b"plain"))
    manifest = early(lake, Early, source, careful=True)
    noted = Notes(lake, "early", "r1").read()
    assert sorted(noted) == [("q", "ack-m0"), ("q", "ack-m1")]
    by_id = {row["message_id"]: (row["outcome"], row["action"]) for row in rows_of(lake, "early", manifest, "outcomes")}
    assert by_id == {"m0": ("failed", "told early"), "m1": ("handled", "told early"), "m2": ("handled", "ack")}


def test_a_task_that_is_tried_again_handles_again_and_tells_nothing_twice(lake):
    source = Memory(deliveries_=numbered(b"early"))
    early(lake, Early, source)
    manifest = early(lake, Early, source)
    assert source.told == [("ack", "q", ["ack-m0"])]
    assert (outcomes(lake, "early", manifest), actions(lake, manifest)) == ({"m0": "handled"}, ["told early"])


def test_what_the_source_refuses_is_told_at_the_end_and_is_said_once(lake, caplog):
    source = Moody(deliveries_=numbered(b"early 1", b"early 2", b"early 3"), refuses=("ack-m0", "ack-m1"))
    with caplog.at_level(logging.WARNING):
        manifest = early(lake, Early, source)
    assert actions(lake, manifest) == ["ack", "ack", "told early"]
    assert [record.getMessage() for record in caplog.records] == [
        "memory refused now, and is asked again at the end of the run: ack-m0: not now"
    ]
    assert list(Notes(lake, "early", "r1").read()) == [("q", "ack-m2")], "the source knows the others"


def test_what_a_source_may_not_have_heard_is_told_at_the_end_and_stays_noted(lake):
    source = Moody(deliveries_=numbered(b"early"), away=True)
    manifest = early(lake, Early, source)
    assert actions(lake, manifest) == ["ack"]
    (entry,) = Notes(lake, "early", "r1").read().values()
    assert not entry.certain, "if the run dies, it may be gone from the source"


@pytest.mark.parametrize("gone", ["given up", "finished"])
def test_nobody_is_told_for_a_receive_that_was_given_up(lake, gone):
    source = Memory(deliveries_=numbered(b"early"))
    if gone == "given up":
        Notes(lake, "early", "r1").close()
    else:
        Ledger(lake, "early").remove("r1")
    manifest = early(lake, Early, source)
    assert source.told == []
    (failed,) = rows_of(lake, "early", manifest, "failed")
    assert failed["reason"].startswith("receive r1 was given up or taken over")


@pytest.mark.parametrize("careful", [False, True])
def test_what_was_told_and_may_not_begin_any_more_fails_instead_of_going_back(lake, careful):
    source = Memory(deliveries_=numbered(b"1", b"2"))
    manifest = early(lake, Together, source, careful=careful, pace=Stopped(1))
    found = outcomes(lake, "together", manifest)
    told = {one for _, one in Notes(lake, "together", "r1").read()}
    assert found["m0"] == "handled"
    assert found["m1"] == ("failed" if "ack-m1" in told else "returned")
    assert careful or "ack-m1" in told


def test_without_the_option_the_call_fails_its_message_and_says_what_to_write(lake):
    class Forgetful(Obedient):
        name = "forgetful"

        def handle_message(self, message: Message, context: Any) -> Message:
            return message.ack_immediately()

    manifest = handled(lake, Forgetful, b"1")

    (failed,) = rows_of(lake, "forgetful", manifest, "failed")
    assert "ack_immediately requires acks_immediately = True" in failed["reason"]


def test_a_backfill_tells_nobody(lake):
    manifest = handled(lake, Early, b"early", ack_policy=DRIVEN_AGAIN)
    assert actions(lake, manifest) == ["ack"]


def test_it_takes_messages_or_none_at_all():
    (message,) = Message.each(batch_of(b"1"))
    assert ack_immediately([]) == []
    with pytest.raises(TypeError, match="requires messages, got bytes"):
        ack_immediately([b"1"])
    with pytest.raises(RuntimeError, match="acks_immediately = True"):
        ack_immediately([message])
