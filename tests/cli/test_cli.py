"""The command line with a deployment, without a running Dagster."""

import importlib
import os
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from click.testing import Result
from typer.testing import CliRunner

import definitions
from pipeline_platform.cli import loading, main
from pipeline_platform.cli.main import app
from pipeline_platform.cli.terminal import duration
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.decisions.ledger import ReceiveError
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.options import RateLimiting
from pipeline_platform.orchestration.deployment import Built
from pipeline_platform.orchestration.resources.lake_resources import ControlResource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from tests.fixtures.pipelines_under_test import Lettered, Told
from tests.fixtures.small_lake import Keeping, Memory, Run


@pytest.fixture
def variables(tmp_path, monkeypatch):
    """A state folder for the test."""
    for name in ("DAGSTER_HOME", "FLIGHTS_SOURCE", "PIPELINE_PLATFORM_LAKE", "PIPELINE_PLATFORM_CONTROL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIPELINE_PLATFORM_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def cli(variables, monkeypatch):
    """The commands in this process: loading Dagster in a new process takes seconds."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "resources"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.reload(definitions)  # its resources are configured by variables

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    return call


def fill(home: Path, messages: int) -> None:
    queue = TableQueue(name="flights_queue", url=f"sqlite:///{home}/queue.sqlite", created_column="created_at")
    queue.create()
    queue.enqueue([b"{}"] * messages)


def test_status_tells_backlog_runs_and_permits_and_which_store_and_lake_it_looks_at(cli, control, tmp_path):
    fill(tmp_path, 1_234)
    limit = RateLimiting(allowed_messages=500, interval=timedelta(days=1))
    control.set_rate_limiting("flights", limit)
    control.take({"flights": None}, 100)
    control.claim("flights", "a" * 32, "run-alive", wanted=70, capacity=1_000, lease_s=60)
    control.claim("flights", "b" * 32, "run-dead", wanted=5, capacity=1_000, lease_s=-1)

    said = cli("status").stdout

    assert said.startswith(f"Control store: sqlite:///{tmp_path}/control.sqlite\nLake: {tmp_path}/lake\n")
    assert "1,234 waiting; 70 in flight in run run-aliv; " in said, "as in the sensor's tick and the check"
    assert "1,234 messages in flights_queue" in said
    assert "70 messages in 1 run" in said
    assert "400 left in the current interval" in said
    assert "5 messages, crashed or stalled" in said
    assert "undecided receives   none" in said
    assert "unfinished receives  none" in said
    assert "open failures        none" in said


@pytest.fixture
def keeping(tmp_path, beside):
    """The tables of a deployment with another pipeline."""
    beside(Keeping, memory=Memory())
    return Tables(Lake(root=str(tmp_path / "lake")), Keeping)


def leased(tables: Tables, receive_id: str, *payloads: bytes, window: str = "2026-01-01T0000") -> Run:
    """Return a receive of new messages."""
    deliveries = tuple((f"{receive_id} {number}", payload) for number, payload in enumerate(payloads))
    return Run(tables, Memory(deliveries_=deliveries), receive_id, windows=(window,))


def lines(answer: Result) -> list[str]:
    return [line.rstrip() for line in answer.stdout.splitlines()]


def test_status_tells_receives_that_are_not_decided_from_those_that_are_not_finished(cli, keeping):
    leased(keeping, "begun00000000000")
    leased(keeping, "handled000000000", b"one").work()
    leased(keeping, "decided000000000", b"two").work().decide()
    leased(keeping, "published0000000", b"three").work().decide().publish()
    leased(keeping, "finished00000000", b"four").finish()
    said = lines(cli("status"))
    assert " undecided receives   begun000 of run run (begun), handled0 of run run (batched)" in said
    finish = "decided0 of run run (decided), publishe of run run (published)"
    assert [line for line in said if line.startswith(f" unfinished receives  {finish}; ")]


def test_a_look_at_failures_and_outcomes_loads_no_pandas(keeping):
    leased(keeping, "first", b"one", b"fail").finish()
    looked_at = FailedMessages(name="keeping", lake=keeping.lake, pipeline="keeping")
    assert looked_at.chosen_by_window() == {"2026-01-01T0000": 1}
    script = f"""
import sys
from pipeline_platform.cli.status.status_gathering import failures_status, redelivered
from pipeline_platform.lake.storage import Lake
from tests.fixtures.small_lake import Keeping
lake = Lake(root={keeping.lake.root!r})
print(failures_status(lake, Keeping).open, redelivered(lake, Keeping))
sys.exit("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 None\n"), done.stderr


def test_repair_names_what_cannot_be_read_and_takes_it_out_when_told(cli, keeping):
    leased(keeping, "first", b"one").finish()
    assert lines(cli("repair", "keeping")) == ["All files of keeping are intact."]
    (path,) = Path(keeping["outcomes"].uri, "window=2026-01-01T0000").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    named, told = lines(cli("repair", "keeping"))
    assert "keeping/outcomes: window=2026-01-01T0000/" in named
    assert "--apply" in told
    assert "Recorded 0 messages as open failures" in cli("repair", "keeping", "--apply").stdout
    assert lines(cli("repair", "keeping")) == ["All files of keeping are intact."]


def test_status_names_a_receive_that_cannot_be_read_and_tells_the_rest(cli, keeping):
    Run(keeping, Memory(), "ab12").ledger.begin(Run(keeping, Memory(), "cd34").receive)
    keeping.lake.write("keeping/_receives/ab12/receive.json", b"{")
    shown = cli("status", "keeping").stdout
    assert "unreadable receives" in shown
    assert "_receives/ab12/receive.json: not a valid record" in " ".join(shown.split())
    assert "undecided receives   cd34" in shown


AWAY = "AWS Error NETWORK_CONNECTION during ListObjectsV2 operation: curlCode: 7, Could not connect to server"


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (
            OSError(f"When listing objects under key 'lake/told/_receives/' in bucket 'b': {AWAY}"),
            f"The lake did not answer for about 120 s ({AWAY}). Check that the store is running.",
        ),
        (ReceiveError("_receives/ab12/receive.json: not a valid record"), None),
    ],
)
def test_a_lake_that_is_away_or_holds_what_cannot_be_read_is_told_in_a_line(monkeypatch, capsys, raised, line):
    @contextmanager
    def opened():
        raise raised
        yield

    monkeypatch.setattr(loading, "opened", opened)
    assert (ended(monkeypatch, "trace", "told", "5"), capsys.readouterr().err) == (1, f"{line or raised}\n")


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Return the exit code of a command."""
    monkeypatch.setattr(sys, "argv", ["pipeline-platform", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(loading, "_CHOSEN", {})
    with pytest.raises(SystemExit) as left:
        main.main()
    return left.value.code


def test_status_counts_runs_that_dagster_has_queued_or_started(cli, control, tmp_path, monkeypatch):
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    unmade = lines(cli("status"))
    assert os.listdir(home) == ["dagster.yaml"], "while Dagster makes its files, nobody else may"
    with dg.DagsterInstance.get():
        before = lines(cli("status"))
    runs = {"flights": ["NOT_STARTED", "NOT_STARTED", "STARTED", "SUCCESS", "FAILURE"], "another": ["STARTED"]}
    with dg.DagsterInstance.get() as instance:
        for pipeline, statuses in runs.items():
            for status in statuses:
                tags = {f"{pipeline}/origin": "source"}
                instance.add_run(dg.DagsterRun("pull", tags=tags, status=dg.DagsterRunStatus[status]))

        demand = {"flights/origin": "source", "flights/demand": "40"}
        wanting = instance.add_run(dg.DagsterRun("pull", tags=demand))
        ended = instance.add_run(dg.DagsterRun("pull", status=dg.DagsterRunStatus.FAILURE))
        control.claim("flights", "r", ended.run_id, wanted=7, capacity=100, lease_s=60)

    said = lines(cli("status"))
    assert " in flight            0 messages in 0 runs" in said
    assert f"   run {wanting.run_id[:8]}       will lease up to 40 messages" in said
    assert f"   run {ended.run_id[:8]}       7 messages, crashed or stalled" in "\n".join(said)
    assert " runs in Dagster      no instance yet: Dagster has not been started with this DAGSTER_HOME" in unmade
    assert " runs in Dagster      none under way" in before
    assert " runs in Dagster      3 not started, 1 started" in said


def test_status_tells_the_rest_where_dagster_cannot_be_asked(cli, tmp_path, monkeypatch):
    nowhere = cli("status").stdout
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "typo"))
    typo = cli("status").stdout
    assert "runs in Dagster      DAGSTER_HOME is not set" in nowhere
    assert "unavailable: DagsterInvariantViolationError" in typo
    assert "open failures        none" in typo


def test_status_of_a_source_that_is_not_there_says_so_and_tells_the_rest(cli):
    answer = cli("status", "flights")
    assert answer.exit_code == 2, answer.stderr
    assert "cannot be used" in answer.stdout
    assert "in flight" in answer.stdout


def test_a_variable_that_is_not_set_is_named_without_a_traceback(cli, monkeypatch, capsys):
    monkeypatch.setitem(definitions.RESOURCES, "control", ControlResource(url=dg.EnvVar("NOWHERE_SET")))

    assert ended(monkeypatch, "status") == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the resources of definitions cannot be set up: control.url: ")
    assert '"NOWHERE_SET" which is not set' in line


def test_a_pipeline_that_cannot_work_is_refused_without_a_traceback(tmp_path, monkeypatch, capsys):
    (tmp_path / "mistaken.py").write_text(
        "from pipeline_platform import Pipeline\nclass Orders(Pipeline):\n    prosessors = 1\n"
    )
    monkeypatch.chdir(tmp_path)

    assert ended(monkeypatch, "-m", "mistaken", "status") == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Orders.prosessors: is not an option")


def test_an_interval_that_is_none_is_refused(beside):
    cli = beside(Told)
    for interval in ("nan", "1e-7", "1e300"):
        answer = cli("limit", "told", "--allowed", "5", "--interval", interval)
        assert answer.exit_code == 2, interval
        assert "--interval must be 0.001 to" in answer.stderr


def test_a_pause_holds_until_it_is_resumed(cli, control, tmp_path):
    said = cli("pause", "flights", "--reason", "the lake is moving").stdout
    assert "Paused flights: the lake is moving" in said
    assert f"Control store: sqlite:///{tmp_path}/control.sqlite" in said, "who changes something is told whose"
    assert control.paused("flights") == "the lake is moving"
    assert "Resumed flights." in cli("resume", "flights").stdout
    assert control.paused("flights") is None
    assert "was not paused" in cli("resume", "flights").stdout


def test_a_limit_is_set_changed_and_reset(cli, control):
    cli("limit", "flights", "--allowed", "5")
    assert control.rate_limiting("flights", None) == RateLimiting(allowed_messages=5, interval=timedelta(seconds=1))
    cli("limit", "flights", "--interval", "2")
    cli("limit", "flights", "--allowed", "6")
    held = control.rate_limiting("flights", None)
    assert held == RateLimiting(allowed_messages=6, interval=timedelta(seconds=2))
    assert "100,000 messages every 1 s" in cli("limit", "flights", "--reset").stdout, "the pipeline's own"
    assert control.rate_limiting("flights", None) is None


class Unlimited(Told):
    """A pipeline without a rate limit."""

    name = "unlimited"


def test_a_part_of_a_limit_that_is_not_there_is_refused_with_the_way_out(beside):
    cli = beside(Unlimited)
    refused, told = cli("limit", "unlimited", "--allowed", "5"), cli("limit", "unlimited")
    assert refused.exit_code == 2
    assert "Give both --allowed and --interval" in refused.output
    assert "has no rate limit" in told.output


def test_an_unknown_pipeline_is_refused_with_those_there_are(cli):
    for command in ("status", "pause"):
        answer = cli(command, "flihgts")
        assert answer.exit_code == 2, command
        assert "pipeline 'flihgts' does not exist. The pipelines are flights." in answer.stderr


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.31, "0.3 s"), (59.2, "59 s"), (90, "1.5 min"), (7_200, "2 h"), (1e6, "12 d")]
)
def test_a_duration_is_shown_in_its_largest_unit(seconds, told):
    assert duration(seconds) == told


def test_a_table_queue_is_made_and_looked_at(cli, tmp_path):
    assert (
        "flights_queue is ready: table 'messages' with messages_leases"
        in cli("table-queue", "create", "flights_queue").output
    )
    fill(tmp_path, 3)
    queue = TableQueue(name="flights_queue", url=f"sqlite:///{tmp_path}/queue.sqlite", created_column="created_at")
    queue.plan(2, 1, "somebody")
    shown = lines(cli("table-queue", "show", "flights_queue"))
    assert shown[0].startswith("1 message waiting, the oldest since 20")
    assert shown[1].startswith("2 messages leased by receive somebody for another ")


def test_the_table_of_a_queue_of_dead_letters_is_made(cli, tmp_path, monkeypatch):
    dead = source_resource(TableQueue)(name="letters", url=f"sqlite:///{tmp_path}/dead.sqlite")
    queue = definitions.RESOURCES["flights_queue"]
    built = Built((Lettered,), {**definitions.RESOURCES, "queue": queue, "letters": dead})
    monkeypatch.setattr("pipeline_platform.orchestration.deployment.BUILT", [built])
    assert "letters is ready" in cli("table-queue", "create", "letters").output
    assert cli("table-queue", "show", "letters").output == "0 messages waiting.\n"


def test_a_key_that_is_no_table_queue_is_refused_with_those_there_are(cli):
    answer = cli("table-queue", "show", "flights")
    assert answer.exit_code == 2
    assert "'flights' is not a table queue of this deployment. The table queues are flights_queue." in " ".join(
        answer.output.replace("│", "").split()
    )


def test_variables_that_are_not_set_are_read_from_the_file_that_dagster_reads(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("definitions", "resources")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PIPELINE_PLATFORM_LAKE", "")  # whatever is loaded is undone after the test
    monkeypatch.delenv("PIPELINE_PLATFORM_LAKE")
    (tmp_path / ".env").write_text(f"PIPELINE_PLATFORM_LAKE={tmp_path}/elsewhere\nPIPELINE_PLATFORM_HOME=/nowhere\n")
    said = cli("-m", "definitions", "status").stdout
    assert f"Lake: {tmp_path}/elsewhere" in said
    assert f"Control store: sqlite:///{tmp_path}/control.sqlite" in said, "what is set comes before it"


def test_a_shell_completes_the_names_of_pipelines():
    words = "pipeline-platform status fl"
    asked = {"_PIPELINE_PLATFORM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "2"}
    command = [str(Path(sys.executable).with_name("pipeline-platform"))]
    answer = subprocess.run(
        command,
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(definitions.__file__).parent,
    )
    assert answer.stdout.split() == ["flights"]
