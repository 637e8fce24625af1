"""Runs start in processes that have already loaded the project, and are watched."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import dagster as dg
import psutil
import pytest
from dagster._core.launcher import WorkerStatus

from pipeline_platform.launcher import run_launcher, run_process
from pipeline_platform.launcher.run_launcher import StandbyRunLauncher
from pipeline_platform.launcher.run_process import LAUNCHER_TAG, PROCESS_TAG, RunProcess, is_gone
from pipeline_platform.process import born
from tests.fixtures.launching import PATIENCE_S, deployed, deployed_again

STARTED = dg.DagsterRunStatus.STARTED


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with deployed(tmp_path_factory.mktemp("launching")) as launching:
        yield launching


@pytest.fixture
def launching(deployment):
    """A deployment whose code returns `first`."""
    (deployment.folder / ".env").unlink(missing_ok=True)
    deployment.write("first")
    return deployment


@pytest.fixture
def waiting(launching):
    """The process that stands by with this code."""
    standby = launching.launcher._waiting.get("told")
    if not (standby and standby.is_ready()):
        launching.told(launching.launch("telling"))
    return launching.standing_by()


def test_a_run_starts_in_a_standby_process_and_sees_later_edits_and_variables(launching, waiting, monkeypatch):
    launched_by: list[tuple[RunProcess | None, bool | None]] = []
    take = StandbyRunLauncher._take

    def look(launcher: StandbyRunLauncher, location: str) -> Any:
        (run,) = launcher._instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING]))
        launched_by.append((RunProcess.of(run, LAUNCHER_TAG), is_gone(run)))
        return take(launcher, location)

    with monkeypatch.context() as patch:
        patch.setattr(StandbyRunLauncher, "_take", look)
        run = launching.launch("telling")
    assert launching.process(run).pid == waiting
    assert launching.told(run)["said"] == "first"
    ((launcher, gone),) = launched_by
    assert launcher
    assert (launcher.pid, gone) == (os.getpid(), False), "others can check whether a slow launcher is alive"

    following = launching.standing_by()
    assert following != waiting, "a process executes one run"
    launching.write("second")
    (launching.folder / ".env").write_text("STANDBY_TEST=set")
    edited = launching.launch("telling")
    told = launching.told(edited)
    assert (told["said"], told["variable"]) == ("second", "set")
    assert launching.process(edited).pid != following
    assert born(following) is None, "an outdated process ends"

    waiting = launching.standing_by()
    run = launching.launch("telling")
    assert launching.process(run).pid == waiting
    assert launching.told(run)["variable"] == "set"


FRESHNESS = """
import os, pathlib, sys, types
from pipeline_platform.launcher import standby

folder, variables = pathlib.Path(sys.argv[1]), {"STANDBY_TEST": "set"}
code, option, part = (folder / name for name in ("code/location_under_test.py", "option.yaml", "parts/second"))
sys.path.insert(0, str(code.parent))

def load():
    import location_under_test
    option.read_text()
    os.listdir(part.parent)
    print(os.environ["STANDBY_TEST"])

loaded = standby._Loaded(types.SimpleNamespace(load=load, variables=lambda: dict(variables)))
print(loaded.is_fresh())
for change, restore in (
    *((lambda f=f: os.utime(f, (2, 2)), lambda f=f: os.utime(f, (1, 1))) for f in (code, option)),
    (part.mkdir, part.rmdir),
    (lambda: variables.update(STANDBY_TEST="other"), lambda: variables.update(STANDBY_TEST="set")),
    (lambda: code.rename(folder / "moved"), lambda: (folder / "moved").rename(code)),
):
    change()
    print(loaded.is_fresh())
    restore()
print(loaded.is_fresh())
"""


def test_a_standby_process_is_outdated_after_a_change_of_code_files_listed_folders_or_variables(tmp_path):
    """For example the `defs.yaml` of a component, or a scaffolded component, which changes no existing file."""
    for name in ("code/location_under_test.py", "option.yaml", "parts/first"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    command = [sys.executable, "-c", FRESHNESS, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert told == ["set", "True", *["False"] * 5, "True"]


@pytest.mark.faults
def test_a_run_survives_the_crash_of_its_standby_process(launching, waiting):
    os.kill(waiting, signal.SIGKILL)
    assert launching.told(launching.launch("telling"))["said"] == "first"


@pytest.mark.faults
def test_a_run_survives_the_crash_of_its_standby_process_at_the_handover(launching, waiting, monkeypatch):
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
    assert "was ended by signal 9" in str(failure.dagster_event.message)


def test_another_process_terminates_a_run_by_its_tag(launching):
    """For example the web server terminates runs that the daemon launched."""
    run = launching.launch("sleeping")
    process = launching.at_work(run)
    with dg.DagsterInstance.from_ref(launching.instance.get_ref()) as other:
        assert other.run_launcher.terminate(run)
        assert launching.ended(run) is dg.DagsterRunStatus.CANCELED
        assert not other.run_launcher.terminate(run), "a run that has ended cannot be ended"
    launching.until("its process has ended", lambda: not process.lives)


@pytest.mark.parametrize("hidden", [("socket.gethostname", "elsewhere"), (f"{run_process.__name__}.born", None)])
def test_a_web_server_that_does_not_see_the_process_terminates_a_run(launching, monkeypatch, hidden):
    """It is on another host, or systemd hides the processes of the daemon from it."""
    monkeypatch.setattr(run_launcher, "_LOOK_S", 0.1)
    launcher, run_id = launching.launcher, launching.instance.add_run(dg.DagsterRun("sleeping", status=STARTED)).run_id
    monkeypatch.setitem(launcher._waiting, "any", None)
    with subprocess.Popen(["sleep", "600"]) as process:
        launching.instance.add_run_tags(run_id, {PROCESS_TAG: RunProcess.tag(run_id, process.pid)})
        watched = (SimpleNamespace(process=process), run_id, SimpleNamespace(name="any"))
        attending = threading.Thread(target=launcher._attend, args=watched)
        attending.start()
        with dg.DagsterInstance.from_ref(launching.instance.get_ref()) as other, monkeypatch.context() as there:
            there.setattr(hidden[0], lambda *_: hidden[1])
            assert other.run_launcher.terminate(run_id)
        attending.join()
    assert process.returncode == -signal.SIGTERM
    assert launching.ended(run_id) is dg.DagsterRunStatus.CANCELED


@pytest.mark.faults
def test_a_run_that_is_terminated_before_its_process_listens_is_canceled(launching, waiting):
    os.kill(waiting, signal.SIGKILL)
    run = launching.launch("sleeping")
    assert launching.launcher.terminate(run)
    assert launching.ended(run) is dg.DagsterRunStatus.CANCELED


def test_run_monitoring_finds_a_run_whose_process_is_not_watched(launching):
    run, check = dg.DagsterRun("sleeping", status=STARTED), launching.launcher.check_run_worker_health
    with subprocess.Popen(["sleep", "600"]) as process:
        tag = RunProcess.tag(run.run_id, process.pid)
        assert check(run.with_tags({PROCESS_TAG: tag})).status is WorkerStatus.RUNNING
        process.kill()
    assert check(run.with_tags({PROCESS_TAG: tag})).status is WorkerStatus.FAILED
    elsewhere = json.dumps({**json.loads(tag), "host": "elsewhere"})
    assert check(run.with_tags({PROCESS_TAG: elsewhere})).status is (WorkerStatus.RUNNING), "only its host can check it"


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


def test_without_the_private_api_the_launcher_warns_once_and_launches_as_dagster_does(monkeypatch, caplog):
    import pipeline_platform.launcher

    launched = []
    monkeypatch.setattr(dg.DefaultRunLauncher, "launch_run", lambda _, context: launched.append(context))
    monkeypatch.delattr("dagster._utils.hosted_user_process.recon_repository_from_origin")
    for module in ("internals", "standby", "run_launcher"):
        monkeypatch.delitem(sys.modules, f"pipeline_platform.launcher.{module}", raising=False)
        monkeypatch.delattr(pipeline_platform.launcher, module, raising=False)

    launcher = importlib.import_module("pipeline_platform.launcher.run_launcher").StandbyRunLauncher()
    launcher.launch_run("a run")
    assert launched == ["a run"]
    assert not launcher.supports_check_run_worker_health

    (warning,) = [line for line in caplog.messages if "No standby processes" in line]
    assert "recon_repository_from_origin" in warning


def test_a_tag_of_another_release_is_ignored(launching):
    earlier = {PROCESS_TAG: json.dumps({"host": "here", "pid": 1, "born": "1"})}
    for tags in (earlier, {PROCESS_TAG: "no JSON"}, {PROCESS_TAG: "[]"}):
        run = dg.DagsterRun(job_name="sleeping", status=STARTED, tags=tags)
        assert launching.launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING
        assert not launching.launcher.terminate(launching.instance.add_run(run).run_id)
        launching.instance.delete_run(run.run_id)


def test_standby_processes_end_with_the_instance_and_runs_continue(launching, waiting):
    """The last test of the file, because its launcher starts no more standby processes."""
    run = launching.launch("sleeping")
    process, following = launching.at_work(run), launching.standing_by()
    launching.launcher.dispose()
    assert born(following) is None
    assert process.lives
    os.kill(process.pid, signal.SIGKILL)
    launching.ended(run)
