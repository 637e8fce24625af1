"""Dagster as it is deployed: daemon, code server, web server and runs in separate processes."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.orchestration.jobs import RunTags
from servers.server import free_ports
from tests.fixtures.pipelines_under_test import Told

ROOT = Path(__file__).parents[2]
TAGS = RunTags.of(Told)
DAEMON = """
from dagster._daemon import controller
from dagster._daemon.cli import main
controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 1  # backfills are looked at each half minute otherwise
main()
"""
UNDER_WAY = ("QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING")
LOCATION = {"repositoryName": "__repository__", "repositoryLocationName": "under_test"}


@dataclass
class Deployed:
    """A deployment on loopback in its own folder."""

    folder: Path
    port: int
    environment: dict[str, str]
    instance: dg.DagsterInstance
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def queue(self) -> TableQueue:
        return TableQueue(name="queue", url=f"sqlite:///{self.folder}/queue.sqlite", created_column="created_at")

    def start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.children.append(
            subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )

    def call(self, *command: str) -> None:
        """Run a command of Dagster's command line with the workspace."""
        done = subprocess.run(
            [sys.executable, "-m", "dagster", *command, "--workspace", str(self.folder / "workspace.yaml")],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3_000:]

    def stop(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for child in self.children:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, sent)
            for child in self.children:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(10)

    def ask(self, query: str, **variables: Any) -> Any:
        """Return the answer of the web server to a GraphQL query."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        url = f"http://127.0.0.1:{self.port}/graphql"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            answer = json.load(reply)
        assert "errors" not in answer, answer["errors"]
        return answer["data"]

    def until(self, what: str, found: Callable[[], Any], within_s: float = 240.0) -> Any:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with suppress(urllib.error.URLError, ConnectionError):
                if answer := found():
                    return answer
            time.sleep(0.2)
        logs = {path.name: path.read_text(errors="replace")[-3_000:] for path in self.folder.glob("*.log")}
        raise AssertionError(f"not after {within_s:.0f} s: {what}\n{logs}")

    def rows(self, table: str) -> pl.DataFrame:
        return pl.read_delta(str(self.folder / "lake" / "told" / table))

    def left(self) -> int:
        with sqlite3.connect(self.folder / "queue.sqlite") as database:
            return int(database.execute("SELECT count(*) FROM messages").fetchone()[0])


@pytest.fixture(scope="module")
def deployed(tmp_path_factory, warm_spark):
    """Yield a daemon and a web server with the pipelines under test and an empty queue."""
    with deployment(tmp_path_factory.mktemp("deployed"), warm_spark.folder, web=True) as started:
        yield started


@contextmanager
def deployment(
    folder: Path,
    spark_folder: Path,
    module: str = "tests.fixtures.location_under_test",
    files: Sequence[Path] = (),
    settings: str = "",
    web: bool = False,
) -> Iterator[Deployed]:
    """Yield a daemon with one code location per file, in a folder, on a warm Spark.

    `settings` are more settings of the instance, as YAML. Only `web` starts a web server, which `Deployed.ask` needs.
    """
    home = folder / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text() + settings)
    where = {"module_name": module, "location_name": "under_test", "working_directory": str(ROOT)}
    workspace = folder / "workspace.yaml"
    places = [
        {"relative_path": str(file), "working_directory": str(file.parent), "location_name": file.parent.name}
        for file in files
    ]
    locations = [{"python_file": place} for place in places] or [{"python_module": where}]
    workspace.write_text(json.dumps({"load_from": locations}))
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "PIPELINES_UNDER_TEST": str(folder),
        "SPARK_UNDER_TEST": str(spark_folder),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(home))
        # Opened before any process, because two processes that create the same SQLite storage at once damage it.
        with dg.DagsterInstance.get() as instance:
            deployment = Deployed(folder, free_ports(1)[0], environment, instance)
            deployment.queue.create()
            try:
                deployment.start("daemon", "-c", DAEMON, "run", "-w", str(workspace))
                if web:
                    address = ("-h", "127.0.0.1", "-p", str(deployment.port))
                    deployment.start("web", "-m", "dagster_webserver", *address, "-w", str(workspace))
                yield deployment
            finally:
                deployment.stop()


def done(instance: dg.DagsterInstance) -> bool:
    return not [run for run in instance.get_runs() if run.status.value in UNDER_WAY]


@pytest.mark.faults
def test_queued_messages_reach_the_tables_by_sensor_and_daemon(deployed):
    payloads = [*(f"line {n}" for n in range(130)), *(f"fail {n}" for n in range(20)), *(["letter a"] * 10)]
    deployed.queue.enqueue(payload.encode() for payload in payloads)
    deployed.until("the queue is empty", lambda: deployed.left() == 0)
    deployed.until("the runs have ended", lambda: done(deployed.instance))
    assert sorted(deployed.rows("lines")["text"]) == sorted(payloads[:130])
    assert deployed.rows("letters").height == 10
    assert deployed.rows("failed").filter(state="open").height == 20
    runs = deployed.instance.get_runs()
    assert {run.status.value for run in runs} == {"SUCCESS"}
    assert {run.tags.get(TAGS.origin) for run in runs} == {"source"}


TOGETHER = """
query Together($keys: [AssetKeyInput!]!) { assetNodeAdditionalRequiredKeys(assetKeys: $keys) { path } }
"""
LAUNCH = """
mutation Launch($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }
"""
STATUS = """
query Status($id: String!) { partitionBackfillOrError(backfillId: $id) {
  __typename ... on PartitionBackfill { status error { message } runs(limit: 10) { runId } } } }
"""


@pytest.mark.faults
def test_a_backfill_from_the_asset_page_needs_no_configuration(deployed, failures_in_two_windows):
    """Materialise the windows of the failures, and an empty window between them, as the page does."""
    before = attempts(deployed)
    chosen = {"path": ["told", "failed"]}
    others = deployed.ask(TOGETHER, keys=[chosen])["assetNodeAdditionalRequiredKeys"]
    assert others == [], "the page opens no dialog of several assets"
    params = {"assetSelection": [chosen], "partitionNames": [EARLY, BETWEEN, LATE], "fromFailure": False}
    runs = backfill(deployed, params)
    assert len(runs) == 1, "one run per contiguous range of windows"
    assert runs[0].tags[TAGS.origin] == "failed"
    again = max(attempt for _, attempt in before) + 1
    assert attempts(deployed) == {**before, (EARLY, again): 5, (LATE, again): 7}, "retried, failed once more"


def backfill(deployed: Deployed, params: dict[str, Any], ends: str = "COMPLETED_SUCCESS") -> list[dg.DagsterRun]:
    """Launch a backfill as the UI does, wait for its end, and return its runs."""
    launched = deployed.ask(LAUNCH, params={"fromFailure": False, **params})["launchPartitionBackfill"]
    assert launched["__typename"] == "LaunchBackfillSuccess", launched

    def over() -> Any:
        told = deployed.ask(STATUS, id=launched["backfillId"])["partitionBackfillOrError"]
        return told if told["status"] not in ("REQUESTED", "CANCELING", "FAILING") else None

    told = deployed.until("the backfill is over", over)
    assert told["status"] == ends, told
    runs = [deployed.instance.get_run_by_id(run["runId"]) for run in told["runs"]]
    return [run for run in runs if run]


def of_job(job: str, *windows: str) -> dict[str, Any]:
    """Return the parameters of a backfill as a job's Partitions tab requests it."""
    selector = {"partitionSetName": f"{job}_partition_set", "repositorySelector": LOCATION}
    return {"selector": selector, "partitionNames": list(windows)}


EARLY, BETWEEN, LATE = "2025-03-01T0000", "2025-03-01T0100", "2025-03-01T0200"


@pytest.fixture(scope="module")
def failures_in_two_windows(deployed):
    """Create five open failures in an early window and seven in a late window."""
    forced = {"ops": {"told": {"ops": {"receive_messages": {"config": {"ignore_pause": True}}}}}}
    deployed.until("the web server is up", lambda: deployed.ask("query { version }"))
    control = ControlStore(f"sqlite:///{deployed.folder}/control.sqlite")
    control.pause("told", "the sensor would pull into the window of now")
    try:
        for window, count in ((EARLY, 5), (LATE, 7)):
            deployed.queue.enqueue(f"fail {n}".encode() for n in range(count))
            asked = {**of_job("told_pull", window), "runConfigData": json.dumps(forced)}
            assert len(backfill(deployed, asked)) == 1
    finally:
        control.resume("told")
    assert attempts(deployed) == {(EARLY, 1): 5, (LATE, 1): 7}


def attempts(deployed: Deployed) -> dict[tuple[str, int], int]:
    """Return the number of failures of the two windows, by window and attempt."""
    failed = deployed.rows("failed").filter(pl.col("window").is_in([EARLY, BETWEEN, LATE]))
    counted = failed.group_by("window", "attempt").len().sort("window", "attempt")
    return {(window, attempt): count for window, attempt, count in counted.iter_rows()}


def windows_of(run: dg.DagsterRun) -> tuple[str, str]:
    """Return the first and the last window of a run."""
    first, last = (run.tags.get(f"dagster/asset_partition_range_{end}") for end in ("start", "end"))
    window = run.tags.get("dagster/partition", "")
    return first or window, last or window


@pytest.mark.faults
def test_a_backfill_from_the_command_line_retries_each_window_once(deployed, failures_in_two_windows):
    before = attempts(deployed)
    already = {run.run_id for run in deployed.instance.get_runs()}
    again = max(attempt for _, attempt in before) + 1

    deployed.call("job", "backfill", "--job", "told_retry", "--from", EARLY, "--to", LATE, "--noprompt")

    def ended() -> Any:
        runs = [
            run for run in deployed.instance.get_runs() if run.run_id not in already and run.job_name == "told_retry"
        ]
        return runs if len(runs) == 3 and all(run.is_finished for run in runs) else None

    runs = deployed.until("its runs have ended", ended)
    assert {run.status for run in runs} == {dg.DagsterRunStatus.SUCCESS}
    assert sorted(windows_of(run)[0] for run in runs) == [EARLY, BETWEEN, LATE]
    assert attempts(deployed) == {**before, (EARLY, again): 5, (LATE, again): 7}


def run_at_work(deployed: Deployed, pipeline: str = "told", messages: int = 0) -> tuple[str, int]:
    """Wait until a run of a pipeline handles messages, at least this many; return its id and its process."""
    control = ControlStore(f"sqlite:///{deployed.folder}/control.sqlite")

    def at_work() -> Any:
        for claim in control.in_flight(pipeline):
            if claim.messages >= max(messages, 1) and (pid := handling_in(deployed.instance, claim.run_id)):
                run = deployed.instance.get_run_by_id(claim.run_id)
                return (claim.run_id, pid) if run and not run.is_finished else None
        return None

    found: tuple[str, int] = deployed.until("a run handles the messages", at_work)
    return found


def texts(deployed: Deployed, *beginnings: str) -> list[str]:
    """Return the lines in the table that start with a text."""
    return sorted(text for text in deployed.rows("lines")["text"] if text.startswith(beginnings))


@pytest.mark.faults
def test_a_killed_run_is_completed_by_the_next(deployed):
    gate = deployed.folder / "killed"
    payloads = [f"wait for {gate}", *(f"late {n}" for n in range(60))]
    deployed.queue.enqueue(payload.encode() for payload in payloads)
    run_id, pid = run_at_work(deployed, messages=len(payloads))
    os.kill(pid, signal.SIGKILL)
    gate.touch()
    deployed.until("the next run has done it", lambda: deployed.left() == 0)
    assert texts(deployed, "late", f"wait for {gate}") == sorted(payloads)
    killed = deployed.instance.get_run_by_id(run_id)
    assert killed is not None
    assert killed.status != dg.DagsterRunStatus.SUCCESS


def handling_in(instance: dg.DagsterInstance, run_id: str) -> int | None:
    """Return the process of a run that has started to handle messages."""
    starts = instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_START)
    return next(
        (start.dagster_event.pid for start in starts if (start.step_key or "").endswith(".handle_messages")), None
    )
