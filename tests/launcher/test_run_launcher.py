"""Runs start in processes that have already loaded the project, and are watched."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import dagster as dg
import psutil
import pytest
from dagster._core.launcher import WorkerStatus

from pipeline_platform.launcher.run_launcher import StandbyRunLauncher
from pipeline_platform.launcher.run_process import LAUNCHER_TAG, PROCESS_TAG, RunProcess, is_gone
from pipeline_platform.process import born
from tests.fixtures.launching import PATIENCE_S, deployed, deployed_again


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with deployed(tmp_path_factory.mktemp("launching")) as launching:
        yield launching


@pytest.fixture
def launching(deployment):
    """A deployment whose code returns `first`, with a standby process."""
    (deployment.folder / ".env").unlink(missing_ok=True)
    waiting = deployment.waiting
    if deployment.write("first") or not waiting or not born(waiting):
        deployment.told(deployment.launch("telling"))
    deployment.standing_by()
    return deployment


def test_a_run_starts_in_the_standby_process(launching):
    waiting = launching.standing_by()
    run = launching.launch("telling")
    assert launching.process(run).pid == waiting
    assert launching.told(run)["said"] == "first"
    assert launching.standing_by() != waiting, "a process executes one run"


def test_a_run_sees_an_edit_made_after_the_standby_process_loaded(launching):
    waiting = launching.standing_by()
    launching.write("second")
    edited = launching.launch("telling")
    assert launching.told(edited)["said"] == "second"
    assert launching.process(edited).pid != waiting
    assert born(waiting) is None, "an outdated process ends"


def test_a_run_sees_an_edit_of_a_file_that_the_standby_process_had_read(launching):
    """For example the `defs.yaml` of a component."""
    waiting = launching.standing_by()
    (launching.folder / "option.yaml").write_text("second")
    edited = launching.launch("telling")
    assert launching.told(edited)["option"] == "second"
    assert launching.process(edited).pid != waiting


def test_a_run_sees_a_new_file_in_a_folder_that_the_standby_process_had_listed(launching):
    """For example a scaffolded component: no existing file changes."""
    launching.standing_by()
    (launching.folder / "parts" / "second").mkdir()
    assert launching.told(launching.launch("telling"))["parts"] == "first, second"


def test_a_run_sees_variables_set_after_the_standby_process_loaded(launching):
    (launching.folder / ".env").write_text("STANDBY_TEST=set")
    assert launching.told(launching.launch("telling"))["variable"] == "set"
    waiting = launching.standing_by()
    run = launching.launch("telling")
    assert launching.process(run).pid == waiting
    assert launching.told(run)["variable"] == "set"


@pytest.mark.faults
def test_a_run_survives_the_crash_of_its_standby_process(launching):
    os.kill(launching.standing_by(), signal.SIGKILL)
    assert launching.told(launching.launch("telling"))["said"] == "first"


@pytest.mark.faults
def test_a_run_survives_the_crash_of_its_standby_process_at_the_handover(launching, monkeypatch):
    take = StandbyRunLauncher._take

    def taken_and_killed(launcher: StandbyRunLauncher, location: str) -> Any:
        standby = take(launcher, location)
        assert standby
        standby.dismiss()
        return standby

    monkeypatch.setattr(StandbyRunLauncher, "_take", taken_and_killed)
    run = launching.launch("telling")
    assert launching.told(run)["said"] == "first"


def test_code_that_no_longer_loads_fails_the_run_with_the_reason(launching):
    (launching.folder / "location.py").write_text("import nothing_of_this_name")
    run = launching.launch("telling")
    assert launching.ended(run) is dg.DagsterRunStatus.FAILURE
    events = launching.instance.all_logs(run)
    assert any("nothing_of_this_name" in str(event) for event in events)


@pytest.mark.faults
def test_a_run_whose_process_is_killed_fails_at_once(launching):
    run = launching.launch("sleeping")
    os.kill(launching.at_work(run).pid, signal.SIGKILL)
    assert launching.ended(run) is dg.DagsterRunStatus.FAILURE
    (failure,) = launching.instance.all_logs(run, of_type=dg.DagsterEventType.RUN_FAILURE)
    assert failure.dagster_event
    assert "was ended by SIGKILL" in str(failure.dagster_event.message)


def test_another_process_terminates_a_run_by_its_tag(launching):
    """For example the web server terminates runs that the daemon launched."""
    run = launching.launch("sleeping")
    process = launching.at_work(run)
    with dg.DagsterInstance.from_ref(launching.instance.get_ref()) as other:
        assert other.run_launcher.terminate(run)
        assert launching.ended(run) is dg.DagsterRunStatus.CANCELED
        assert not other.run_launcher.terminate(run), "a run that has ended cannot be ended"
    launching.until("its process has ended", lambda: not process.lives)


def test_a_web_server_on_another_host_terminates_a_run(launching, monkeypatch):
    run = launching.launch("sleeping")
    process = launching.at_work(run)
    with dg.DagsterInstance.from_ref(launching.instance.get_ref()) as other, monkeypatch.context() as there:
        there.setattr("socket.gethostname", lambda: "elsewhere")
        assert other.run_launcher.terminate(run)
    assert launching.ended(run) is dg.DagsterRunStatus.CANCELED
    launching.until("its process has ended", lambda: not process.lives)


@pytest.mark.faults
def test_a_run_that_is_terminated_before_its_process_listens_is_canceled(launching):
    os.kill(launching.standing_by(), signal.SIGKILL)
    run = launching.launch("sleeping")
    assert launching.launcher.terminate(run)
    assert launching.ended(run) is dg.DagsterRunStatus.CANCELED


def test_run_monitoring_finds_a_run_whose_process_is_not_watched(launching):
    run = launching.launch("sleeping")
    process = launching.at_work(run)
    check = launching.launcher.check_run_worker_health
    assert check(launching.run(run)).status is WorkerStatus.RUNNING

    gone = replace(process, born="another boot/1")
    elsewhere = replace(gone, host="elsewhere")
    tagged = {PROCESS_TAG: json.dumps(asdict(gone))}
    assert check(launching.run(run).with_tags(tagged)).status is WorkerStatus.FAILED
    assert check(launching.run(run).with_tags({PROCESS_TAG: json.dumps(asdict(elsewhere))})).status is (
        WorkerStatus.RUNNING
    ), "only its own host can check it"

    os.kill(process.pid, signal.SIGKILL)
    launching.ended(run)


@pytest.mark.faults
@pytest.mark.parametrize("tag", [PROCESS_TAG, LAUNCHER_TAG])
def test_a_run_that_crashed_with_its_launcher_before_it_started_fails_at_the_next_launch(launching, tag):
    run = launching.instance.add_run(dg.DagsterRun(job_name="sleeping", status=dg.DagsterRunStatus.STARTING))
    with subprocess.Popen(["sleep", "600"]) as process:
        launching.instance.add_run_tags(run.run_id, {tag: RunProcess.tag(run.run_id, process.pid)})
        process.kill()
    with deployed_again(launching) as restarted:
        restarted.told(restarted.launch("telling"))
    assert launching.run(run.run_id).status is dg.DagsterRunStatus.FAILURE


def test_standby_processes_end_with_the_instance_and_runs_continue(tmp_path):
    with deployed(tmp_path) as launching:
        run = launching.launch("sleeping")
        process = launching.at_work(run)
        waiting = launching.standing_by()
        launching.launcher.dispose()
        assert born(waiting) is None
        assert process.lives
        os.kill(process.pid, signal.SIGKILL)
        launching.ended(run)


@pytest.mark.faults
def test_a_standby_process_ends_with_its_launcher(tmp_path):
    """Also if the launcher is killed and cannot dismiss it."""
    started = tmp_path / "started"
    code = f"""
import os, pathlib, signal
from pipeline_platform.launcher.standby import Standby
standby = Standby()
pathlib.Path({str(started)!r}).write_text(str(standby.process.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert os.spawnle(os.P_WAIT, sys.executable, sys.executable, "-c", code, os.environ) == -signal.SIGKILL
    pid = int(started.read_text())
    deadline = time.monotonic() + PATIENCE_S
    while born(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert born(pid) is None


def test_a_change_of_the_clock_does_not_change_the_start_of_a_process(monkeypatch):
    """psutil 6 adds the boot time as of its last call of `boot_time`."""
    started, boot, known = psutil.Process().create_time() - psutil.boot_time(), [1_000.0], [1_000.0]

    def boot_time() -> float:
        known[:] = boot
        return boot[0]

    monkeypatch.setattr(psutil, "boot_time", boot_time)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: started + known[0])
    before = born(os.getpid())
    boot[0] += 3
    assert born(os.getpid()) == before


def test_the_launcher_was_tried_with_this_dagster():
    """With another version, run this file and `python -m benchmarks.latency`, then update the version here."""
    assert dg.__version__ == "1.13.27"


def test_without_the_private_api_the_launcher_warns_once_and_launches_as_dagster_does(tmp_path, monkeypatch, caplog):
    import pipeline_platform.launcher

    monkeypatch.delattr("dagster._utils.hosted_user_process.recon_repository_from_origin")
    for module in ("internals", "standby", "run_launcher"):
        monkeypatch.delitem(sys.modules, f"pipeline_platform.launcher.{module}", raising=False)
        monkeypatch.delattr(pipeline_platform.launcher, module, raising=False)

    with deployed(tmp_path) as launching:
        run = launching.launch("telling")
        assert launching.told(run)["said"] == "never run"
        assert PROCESS_TAG not in launching.run(run).tags
        assert not launching.instance.run_launcher.supports_check_run_worker_health

    (warning,) = [line for line in caplog.messages if "No standby processes" in line]
    assert "recon_repository_from_origin" in warning


def test_a_tag_of_another_release_is_ignored(launching):
    earlier = {PROCESS_TAG: json.dumps({"host": "here", "pid": 1, "born": "1"})}
    for tags in (earlier, {PROCESS_TAG: "no JSON"}, {PROCESS_TAG: "[]"}):
        run = dg.DagsterRun(job_name="sleeping", status=dg.DagsterRunStatus.STARTED, tags=tags)
        assert launching.launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING
        assert not launching.launcher.terminate(launching.instance.add_run(run).run_id)
        launching.instance.delete_run(run.run_id)


def test_a_slow_launch_is_identified_by_its_launcher(launching, monkeypatch):
    """Other processes can check meanwhile whether the launcher is alive."""
    found: list[tuple[RunProcess | None, bool | None]] = []

    def load_slowly(launcher: StandbyRunLauncher, location: str) -> None:
        (run,) = launcher._instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING]))
        found.append((RunProcess.of(run, LAUNCHER_TAG), is_gone(run)))

    monkeypatch.setattr(StandbyRunLauncher, "_take", load_slowly)
    launching.told(launching.launch("telling"))

    ((launcher, gone),) = found
    assert launcher
    assert (launcher.pid, gone) == (os.getpid(), False)
