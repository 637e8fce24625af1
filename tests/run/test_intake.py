"""What a run takes on: a pull, a backfill and a replay, each within the room there is."""

import pytest

from pipeline_platform.control.demand import RUN_LASTS
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run.begin import begin
from pipeline_platform.run.intake import Intake
from tests.fixtures.flow import WINDOW, Filled, rows, run
from tests.fixtures.flow_pipelines import Obedient, Paced


def test_a_pull_that_nobody_sized_takes_on_what_the_rate_limit_gives_while_a_run_lasts(filled: Filled) -> None:
    flow = filled(Paced, [b"word"])

    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])

    assert 0 < receive.demand <= 10 * (RUN_LASTS.total_seconds() + 1)


def test_a_replay_takes_its_windows_whole_or_not_at_all(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "room_within_s", 0.0)
    flow = filled(Obedient, [b"one", b"two", b"three"])
    run(flow)
    flow.control.claim("obedient", "another", "run", wanted=3_998, capacity=4_000, lease_s=60)

    with pytest.raises(PipelineError, match=r"room for 2 of the 3 messages of this replay.*pause the pipeline"):
        run(flow, "messages")
    flow.control.end("another")
    run(flow, "messages")

    assert sorted(rows(flow, "words")["word"]) == ["one", "three", "two"]


def test_a_replay_claims_its_room_last_for_nobody_renews_it_while_it_looks(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = filled(Obedient, [b"one"])
    run(flow)
    held: list[int] = []
    look = ReplayedMessages.finished

    def finished(source: ReplayedMessages) -> tuple[str, ...]:
        held.append(len(flow.control.in_flight("obedient")))
        return look(source)

    monkeypatch.setattr(ReplayedMessages, "finished", finished)
    begin(flow, origin="messages", run_id="test", windows=[WINDOW])

    assert held == [0]
