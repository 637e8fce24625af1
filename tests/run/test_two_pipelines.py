"""Two pipelines in one run, as "Materialize all" and asset backfills start them: each has its own receive."""

from typing import Any

import dagster as dg
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.jobs import RunTags, receive_config
from pipeline_platform.orchestration.runs import run_receive
from pipeline_platform.run import steps
from tests.fixtures.dagster import ROOT, WINDOW, Location
from tests.fixtures.pipelines_under_test import Beside, Told

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


@pytest.fixture
def beside(location):
    """The queue of the other pipeline, filled like the first queue."""
    queue = TableQueue(name="beside_queue", url=f"sqlite:///{location.root}/beside.sqlite")
    queue.create()
    queue.enqueue(f"beside {n}".encode() for n in range(20))
    location.enqueue(*(f"told {n}" for n in range(20)))
    return queue


def run_both(location: Location, again: dg.ReexecutionOptions | None = None) -> dg.DagsterRun:
    """Materialise all assets of both pipelines in one window, with messages from their sources."""
    place = (str(location.root), str(location.spark_folder))
    job = dg.build_reconstructable_job(
        "tests.fixtures.jobs_under_test", "both_at", place, {}, reconstructor_working_directory=str(ROOT)
    )
    config = {
        "ops": receive_config(BoundProducer(Told), "source")["ops"]
        | receive_config(BoundProducer(Beside), "source")["ops"]
    }  # type: ignore[operator]
    tags = location.stored(again.parent_run_id).tags if again else {"dagster/partition": WINDOW}
    result = dg.execute_job(job, location.instance, run_config=config, tags=tags, reexecution_options=again)
    return location.stored(result.run_id)


def assert_both_are_home(location: Location, beside: TableQueue) -> None:
    assert location.texts() == sorted(f"told {n}" for n in range(20))
    assert sorted(location.rows("lines", "beside")["text"]) == sorted(f"beside {n}" for n in range(20))
    assert (location.waiting(), beside.backlog().messages) == (0, 0)
    assert location.flow().ledger.unfinished() == location.flow(Beside).ledger.unfinished() == []


def told_of(location: Location, run: dg.DagsterRun) -> dict[str, tuple[str, Any]]:
    """Return the check `acknowledged` of each pipeline, as reported by the run, and as evaluated afterwards."""
    logs = location.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    checks = [entry.dagster_event.asset_check_evaluation_data for entry in logs if entry.dagster_event]
    return {
        check.asset_key.path[0]: (check.description, check.metadata["acknowledged"].value)
        for check in checks
        if check.check_name == "acknowledged" and "acknowledged" in check.metadata
    }


def test_both_pipelines_of_a_run_are_received_handled_and_acknowledged(location, beside):
    run = run_both(location)
    assert run.status == SUCCESS
    assert_both_are_home(location, beside)
    assert told_of(location, run) == {
        "told": ("All messages are acknowledged.", 20),
        "beside": ("All messages are acknowledged.", 20),
    }
    receives = {run.tags[RunTags.of(pipeline).receive_id] for pipeline in (Told, Beside)}
    assert len(receives) == 2


def test_both_pipelines_of_a_run_go_on_where_it_failed(location, beside, monkeypatch):
    with monkeypatch.context() as patch:

        def full(*args: Any, **options: Any) -> Any:
            raise OSError(28, "No space left on device")

        patch.setattr(steps, "publish", full)
        failed = run_both(location)
    assert failed.status == FAILURE

    run = run_both(location, dg.ReexecutionOptions.from_failure(failed.run_id, location.instance))

    assert run.status == SUCCESS
    for pipeline in (Told, Beside):
        tag = RunTags.of(pipeline).receive_id
        assert run.tags[tag] == failed.tags[tag], "nothing was received anew"
    assert_both_are_home(location, beside)


def test_a_step_of_a_run_that_received_nothing_receives_first(location):
    """Its first run could not begin, and only later steps are executed again."""
    location.enqueue("one")
    with pytest.MonkeyPatch.context() as patch:

        def unreachable(*args: Any, **options: Any) -> Any:
            raise OSError("no route")

        patch.setattr(run_receive, "begin", unreachable)
        failed = location.run("told_pull")
    later = ["told.handle_messages", "told.handle_batches", "told.handle_failed", "told.commit", "told.acknowledge"]

    run = location.run("told_pull", tags=failed.tags, again=dg.ReexecutionOptions(failed.run_id, step_selection=later))

    assert run.status == SUCCESS
    assert location.checks(run)["acknowledged"].passed
    assert location.waiting() == 0
