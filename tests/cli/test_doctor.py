"""`doctor`: each thing that may be broken, and the check that finds it."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import dagster as dg
import pytest
from typer.testing import CliRunner

from pipeline_platform import Producer
from pipeline_platform.cli.dagster_instance import dagster_instance
from pipeline_platform.cli.doctor import dagster_checks, package_checks, service_checks
from pipeline_platform.cli.doctor.check import CheckState, ok, run_all
from pipeline_platform.cli.main import app
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control import store
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.orchestration.deployment import Built
from pipeline_platform.orchestration.resources.lake_resources import ControlResource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from tests.fixtures.heartbeats import PROJECT, beat, turn_off
from tests.fixtures.pipelines_under_test import Coasts, Told

OK, WARNING, ERROR = CheckState.OK, CheckState.WARNING, CheckState.ERROR


class Slow(Told):
    """A pipeline whose terminated runs need minutes."""

    name = "slow"
    producer = Producer(source="queue")
    shutdown = Told.shutdown * 200


def test_the_settings_of_the_template_are_ok(alive):
    for check in (
        partial(dagster_checks.storage, alive),
        partial(dagster_checks.daemon, alive),
        partial(dagster_checks.sensors, alive, [Told, Coasts]),
        partial(dagster_checks.run_queue, alive, [Told, Coasts]),
        partial(dagster_checks.run_monitoring, alive, [Told, Coasts]),
        partial(dagster_checks.run_retries, alive),
        partial(dagster_checks.ticks, alive, [Told, Coasts]),
        partial(dagster_checks.retention, alive),
    ):
        assert check()[0] is OK, check()


ONE_REPLAY = "{key: pipeline_platform/replay, limit: 1}"
SETTINGS = {
    "coordinator": (
        "run_queue",
        "run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}",
        ERROR,
        "nothing limits the number of runs",
    ),
    "no limit of replays": ("run_queue", "", WARNING, "pipeline_platform/replay"),
    "too few slots": (
        "run_queue",
        f"concurrency: {{runs: {{max_concurrent_runs: 1, tag_concurrency_limits: [{ONE_REPLAY}]}}}}",
        WARNING,
        "max_concurrent_runs is 1",
    ),
    "no monitoring": ("run_monitoring", "run_monitoring: {enabled: false}", ERROR, "run_monitoring is off"),
    "no longest run": ("run_monitoring", "run_monitoring: {enabled: true}", WARNING, "max_runtime_seconds"),
    "short cancel": (
        "run_monitoring",
        "run_monitoring: {enabled: true, max_runtime_seconds: 7200, cancel_timeout_seconds: 90}",
        WARNING,
        "a terminated run may need 410",
    ),
    "one thread": ("ticks", "sensors: {use_threads: false}", WARNING, "use_threads of sensors and schedules is off"),
    "few threads": (
        "ticks",
        "sensors: {use_threads: true, num_workers: 1}\nschedules: {use_threads: true}",
        WARNING,
        "sensors.num_workers is 1",
    ),
    "ticks are kept": ("retention", "", WARNING, "purge_after_days"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_matters_is_found(tmp_path, new_home, case):
    check, settings, state, text = SETTINGS[case]
    new_home(tmp_path, f"telemetry: {{enabled: false}}\n{settings}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        arguments = [instance] if check == "retention" else [instance, [Slow]]
        found = getattr(dagster_checks, check)(*arguments)
    assert found.state is state
    assert text in found.text
    assert found.fix


def test_a_silent_daemon_a_failing_daemon_and_sensors_that_are_off_are_found(alive):
    beat(alive, "SENSOR", error="no space left")
    failing = dagster_checks.daemon(alive)
    assert (failing.state, "no space left" in failing.text) == (WARNING, True)
    beat(alive, "SENSOR", ago_s=600)
    silent = dagster_checks.daemon(alive)
    assert (silent.state, "(only SENSOR)" in silent.text) == (ERROR, True)
    turn_off(alive, "told_maintenance_schedule")
    others = dagster_checks.sensors(alive, [Told])
    assert (others.state, others.text) == (WARNING, "turned off in Dagster: told_maintenance_schedule")
    turn_off(alive, "told_producer")
    assert dagster_checks.sensors(alive, [Told])[:2] == (ERROR, "told_producer is turned off in Dagster")


def test_without_an_instance_the_reason_is_an_error():
    assert dagster_checks.storage("DAGSTER_HOME is not set").state is ERROR


def test_an_instance_whose_storage_fails_is_unavailable(tmp_path, monkeypatch):
    def fail() -> dg.DagsterInstance:
        raise OSError("disk is full")

    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(dg.DagsterInstance, "get", fail)
    with dagster_instance() as instance:
        assert instance == "unavailable: OSError: disk is full"
        assert dagster_checks.storage(instance).state is ERROR


def test_a_control_store_of_another_version_or_that_cannot_be_written_is_found(tmp_path, monkeypatch):
    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    assert service_checks.control_store(control).state is OK
    monkeypatch.setattr(store, "VERSION", store.VERSION - 1)
    other = service_checks.control_store(ControlStore(str(control)))
    assert (other.state, "its tables have version" in other.text) == (ERROR, True)
    (tmp_path / "file").touch()
    assert service_checks.control_store(ControlStore(f"sqlite:///{tmp_path}/file/control.sqlite")).state is ERROR


@pytest.mark.parametrize(("ahead_s", "state"), [(0, OK), (5, WARNING), (-5, WARNING), (60, ERROR)])
def test_a_clock_that_differs_is_found(tmp_path, ahead_s, state):
    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite", now=lambda: time.time() + ahead_s)
    assert service_checks.clock(control).state is state


def test_a_lake_is_written_read_and_left_as_it_was(tmp_path):
    root = tmp_path / "lake"
    root.mkdir()
    assert service_checks.lake(Lake(root=str(root))).state is OK
    assert list(root.iterdir()) == []
    (tmp_path / "file").touch()
    refused = service_checks.lake(Lake(root=str(tmp_path / "file")))
    assert (refused.state, "is not writable" in refused.text) == (ERROR, True)


def test_a_source_that_cannot_be_used_and_an_unset_variable_are_found(tmp_path, monkeypatch):
    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    kind = source_resource(TableQueue)
    built = Built(
        (),
        {
            "missing": kind(name="missing", url=f"sqlite:///{tmp_path}/none.sqlite"),
            "unset": kind(name="unset", url=dg.EnvVar("NOWHERE_SET")),
            "control": ControlResource(url=str(control)),
        },
    )
    missing = service_checks.source("missing", built, control, None)
    assert (missing.state, missing.text.startswith("missing cannot be used: ")) == (ERROR, True)
    unset = service_checks.source("unset", built, control, None)
    assert (unset.state, "NOWHERE_SET" in unset.text) == (ERROR, True)


def test_a_spark_server_that_does_not_answer_and_a_missing_java_are_found(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        spark = SparkResource(remote=f"sc://127.0.0.1:{port}")
        assert service_checks.spark(spark, 5).state is OK
    assert service_checks.spark(spark, 5).state is ERROR
    local = SparkResource(state_folder=str(tmp_path))
    assert service_checks.spark(local, 5).state is OK
    monkeypatch.setattr(service_checks.jvm, "_installed_java", lambda: (None, ["Java 8"]))
    monkeypatch.setattr(service_checks.jvm, "_bundled_java", lambda: None)
    missing = service_checks.spark(local, 5)
    assert (missing.state, "found Java 8" in missing.text) == (ERROR, True)


def test_packages_outside_the_supported_versions_are_found(monkeypatch):
    assert package_checks.packages().state is OK
    versions = {"dagster": "1.9.0"}
    real = package_checks.version
    monkeypatch.setattr(package_checks, "version", lambda name: versions.get(name) or real(name))
    wrong = package_checks.packages()
    assert wrong.state is ERROR
    assert wrong.text.startswith("dagster 1.9.0 is not supported (")
    assert "pip install 'dagster" in wrong.fix


def test_a_check_that_hangs_or_raises_delays_no_other():
    def fail():
        raise RuntimeError("broken")

    started = time.monotonic()
    hung, failed, good = run_all(
        {"hung": threading.Event().wait, "failed": fail, "good": lambda: ok("fine")}, 0.3, lambda name, part: None
    )
    assert time.monotonic() - started < 10
    assert (hung.state, hung.text) == (ERROR, "no answer within 0.3 s")
    assert (failed.state, failed.text) == (ERROR, "RuntimeError: broken")
    assert good.state is OK


DEPLOYMENT = """
from datetime import UTC, datetime
from pipeline_platform import Pipeline, Producer
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import platform_definitions

class Orders(Pipeline):
    name = "orders"
    producer = Producer(source="queue")
    first_window = datetime(2026, 1, 1, tzinfo=UTC)

    def handle_message(self, message, context):
        return message

defs = platform_definitions([Orders], sources={"queue": TableQueue(name="queue", url=URL)})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for a deployment, as working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PIPELINE_PLATFORM_HOME", str(tmp_path / "home"))
    return tmp_path / "here"


def test_a_deployment_with_a_server_that_hangs_is_checked_in_bounded_time(folder, alive):
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections, and never answers
        url = f"postgresql://user:secret@127.0.0.1:{server.getsockname()[1]}/queue"
        (folder / "orders.py").write_text(f"URL = {url!r}\n{DEPLOYMENT}")
        command = [sys.executable, "-m", "pipeline_platform.cli.main", "doctor", "--timeout", "20", "--json"]
        started = time.monotonic()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
        )
        seconds = time.monotonic() - started
    assert done.returncode == 2, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {name: check["state"] for name, check in checks.items() if check["state"] != "ok"} == {
        "source queue": "error"
    }
    assert "secret" not in done.stdout
    assert max(check["seconds"] for name, check in checks.items() if name != "code") < 30
    assert seconds < 90


def test_code_that_cannot_be_loaded_is_found(folder, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    (folder / "broken_orders.py").write_text("1 / 0\nplatform_definitions(")
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(answer.stdout)["checks"]}
    assert answer.exit_code == 2
    assert set(checks) == {"packages", "dagster", "code"}, "the other checks need them"
    assert checks["dagster"]["text"] == "DAGSTER_HOME is not set"
    assert checks["code"]["text"].startswith("broken_orders cannot be loaded: SyntaxError: ")
