"""Progress of launched runs: lines as they change, and how the wait ends."""

from collections.abc import Callable

import dagster as dg
import pytest
import typer

from pipeline_platform.cli.runs.run_progress import follow
from tests.fixtures.pipelines_under_test import Told


@dg.op
def nothing():
    pass


@dg.job
def told_replay():
    nothing()


@pytest.fixture
def instance(tmp_path, monkeypatch, new_home):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    new_home(tmp_path, "telemetry: {enabled: false}")
    with dg.DagsterInstance.get() as instance:
        yield instance


@pytest.fixture
def run(instance):
    return instance.create_run_for_job(told_replay, status=dg.DagsterRunStatus.NOT_STARTED).run_id


def steps(*changes: Callable[[], object]) -> Callable[[float], None]:
    """Make one change at each look."""
    left = list(changes)
    return lambda _: left.pop(0)() if left else pytest.fail("waits for a run that has ended")


def status(instance, run_id: str, event: dg.DagsterEventType) -> Callable[[], object]:
    occurred = dg.DagsterEvent(event.value, "told_replay", message="changed")
    return lambda: instance.report_dagster_event(occurred, run_id)


def reported(instance, run_id: str, window: str, **metadata: int) -> Callable[[], object]:
    event = dg.AssetMaterialization(["told", "messages"], partition=window, metadata=metadata)
    occurred = dg.DagsterEvent(
        dg.DagsterEventType.ASSET_MATERIALIZATION.value,
        "told_replay",
        event_specific_data=dg._core.events.StepMaterializationData(event),
        step_key="told.acknowledge",
    )
    return lambda: instance.report_dagster_event(occurred, run_id)


def test_each_change_is_one_line_and_the_end_has_the_counts_of_all_windows(instance, run, capsys):
    ended = follow(
        Told,
        [run],
        steps(
            lambda: None,
            status(instance, run, dg.DagsterEventType.RUN_START),
            lambda: instance.add_run_tags(run, {"told/received": "1200"}),
            reported(instance, run, "2026-01-01T0000", received=1_000, handled=990, failed=10, returned=0),
            reported(instance, run, "2026-01-01T0100", received=200, handled=200, failed=0, returned=0),
            status(instance, run, dg.DagsterEventType.RUN_SUCCESS),
        ),
    )
    assert ended == {run: "success"}
    assert capsys.readouterr().out.splitlines() == [
        f"run {run[:8]}: not started",
        f"run {run[:8]}: started",
        f"run {run[:8]}: started, 1,200 messages",
        f"run {run[:8]}: success, received 1,200, handled 1,190, failed 10",
        "1 run ended: 1 succeeded.",
    ]


def test_a_failed_run_and_a_deleted_run_count_as_not_succeeded(instance, run, capsys):
    ended = follow(Told, [run, "gone"], steps(status(instance, run, dg.DagsterEventType.RUN_FAILURE)))
    assert ended == {run: "failure", "gone": "deleted"}
    said = capsys.readouterr().out.splitlines()
    assert "run gone: deleted" in said
    assert said[-1] == "2 runs ended: 0 succeeded, 1 deleted, 1 failure."


def test_a_long_wait_in_the_queue_names_the_daemon(instance, run, capsys):
    follow(Told, [run], steps(*[lambda: None] * 70, status(instance, run, dg.DagsterEventType.RUN_CANCELED)))
    captured = capsys.readouterr()
    assert captured.err.count("Dagster daemon") == 1
    assert len(captured.out.splitlines()) == 3


def test_an_interrupt_ends_the_wait_and_leaves_the_runs(instance, run, capsys):
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        follow(Told, [run], interrupt)
    assert ended.value.exit_code == 130
    assert instance.get_run_by_id(run).status is dg.DagsterRunStatus.NOT_STARTED
