"""Spark for runs: shared on a warm server, started by the run without a server, and closed at the end."""

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pydantic
import pytest

from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.spark import engine
from tests.spark.test_engine import ROWS, who

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, os, sys, time
import pyarrow as pa
from pipeline_platform.spark import engine
from tests.spark.test_engine import ROWS, who
from pipeline_platform.orchestration.resources.spark_resource import SparkResource

asked = json.loads(sys.argv[1])
sys.path.insert(0, asked["path"])

def task(index):
    import brewery
    time.sleep(0.3)  # so that both cores get one
    yield pa.RecordBatch.from_pylist([{"share": index, "worker": os.getpid(), "told": brewery.ale}], schema=ROWS)

def endless(index):
    time.sleep(300)
    yield from task(index)

spark = SparkResource(remote="warm", state_folder=asked["folder"], packages=["brewery"])
"""

CLIENT = (
    SCRIPT
    + """
import threading
imported = set()

def look(event, arguments):
    if event == "import" and threading.current_thread() is threading.main_thread():
        imported.add(arguments[0].partition(".")[0])

sys.addaudithook(look)
rows = engine.run(spark.spark_session, task, 2, ROWS).to_pylist()
print(json.dumps({"session": spark.spark_session.session_id, "rows": rows, "imported": sorted(imported)}))
if asked.get("close", True):
    spark.close()
"""
)

TAGGED = (
    SCRIPT
    + """
spark.spark_session.addTag("the dead one")
print("running", flush=True)
try:
    engine.run(spark.spark_session, endless, 2, ROWS)
except Exception as error:
    print("CANCEL" in str(error).upper())
spark.close()
"""
)


@pytest.fixture
def brewery(tmp_path, monkeypatch):
    """A package that no other test ships, so that its session is new."""
    (tmp_path / "brewery").mkdir()
    module = tmp_path / "brewery" / "__init__.py"
    module.write_text(f"# {time.time_ns()}\nale = 'ale'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return module


def client(warm_spark, brewery, script=CLIENT, **asked):
    """A process that uses the warm server, as a run does."""
    asked = json.dumps({"folder": str(warm_spark.folder), "path": str(brewery.parents[1])} | asked)
    return subprocess.Popen(
        [sys.executable, "-c", script, asked], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer(process):
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(out)


def used_here(warm_spark, is_loaded=False):
    """Return the session of a run in this process, and the rows of tasks whose workers may have loaded the code."""

    def task(index):
        brewery = sys.modules["brewery"] if is_loaded else importlib.import_module("brewery")
        time.sleep(0.3)  # so that both cores get one
        yield pa.RecordBatch.from_pylist([{"share": index, "worker": os.getpid(), "told": brewery.ale}], schema=ROWS)

    with closing(warm_spark.resource("brewery")) as spark:
        return spark.spark_session.session_id, engine.run(spark.spark_session, task, 2, ROWS).to_pylist()


def test_runs_of_the_same_code_share_a_session_and_its_warm_workers_until_an_edit(warm_spark, brewery):
    both = [client(warm_spark, brewery) for _ in range(2)]
    first, second = map(answer, both)

    assert second["session"] == first["session"], "each was the first to ship the code"
    assert {row["told"] for row in first["rows"] + second["rows"]} == {"ale"}
    assert not {"dagster_pyspark", "pandas", "pyspark"} & {*first["imported"]}, (
        "see import_apart: not in its main thread"
    )
    session, rows = used_here(warm_spark)
    again, more = used_here(warm_spark)
    assert session == again == first["session"]
    assert {row["worker"] for row in more} <= {row["worker"] for row in first["rows"] + second["rows"] + rows}

    brewery.write_text("ale = 'pale ale'\n")
    edited, rows = used_here(warm_spark)

    assert edited != session
    assert [row["told"] for row in rows] == ["pale ale", "pale ale"]


DEPLOYMENT = """
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration import ControlResource, LakeResource, SparkResource, source_resource
from pipeline_platform.orchestration.deployment import platform_definitions

class Ales(Pipeline):
    name = "ales"
    producer = Producer(source="queue")

    def handle_message(self, message, context):
        return message

resources = {
    "lake": LakeResource(root="lake"),
    "control": ControlResource(url="sqlite:///control.sqlite"),
    "spark": SparkResource(remote="warm"),
    "queue": source_resource(TableQueue)(name="queue", url="sqlite:///queue.sqlite"),
}
platform_definitions([Ales], resources)
"""


def test_a_server_is_started_with_the_session_of_the_deployments_runs_and_workers_that_have_its_code(
    warm_spark, brewery
):
    brewery.write_text(brewery.read_text() + DEPLOYMENT)
    command = [sys.executable, "-m", "pipeline_platform.cli.main", "-m", "brewery", "spark", "start"]
    started = subprocess.run(
        [*command, "--state", str(warm_spark.folder)],
        cwd=brewery.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "ready after" in started.stdout
    _, rows = used_here(warm_spark, is_loaded=True)
    assert {row["told"] for row in rows} == {"ale"}, started.stderr


def test_a_proxy_of_the_environment_is_not_asked_for_this_machines_server(warm_spark, monkeypatch):
    monkeypatch.setenv("no_proxy", "elsewhere.example")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    with closing(warm_spark.resource()) as spark:
        assert spark.spark_session.version.startswith("4")


def test_a_session_that_somebody_stopped_is_followed_by_another(warm_spark, brewery):
    with closing(warm_spark.resource("brewery")) as spark:
        stopped = spark.spark_session.session_id
        spark.spark_session.stop()
    with closing(warm_spark.resource("brewery")) as spark:
        spark.warm_up()
        followed = spark.spark_session.session_id
    with closing(warm_spark.resource("brewery")) as spark:
        again = spark.spark_session.session_id

    assert followed != stopped
    assert again == followed, "all go on to the same one"


def test_work_of_a_dead_run_is_interrupted_from_another_client(warm_spark, brewery):
    dead = client(warm_spark, brewery, TAGGED)
    try:
        assert dead.stdout.readline() == "running\n"
        with closing(warm_spark.resource("brewery")) as spark:
            assert spark.spark_session.interruptTag("somebody else") == []
            interrupted, until = [], time.monotonic() + 60
            while not interrupted and time.monotonic() < until:
                interrupted = spark.spark_session.interruptTag("the dead one")
                time.sleep(0.2)
            assert len(interrupted) == 1
            spark.warm_up()  # needs both cores
        assert dead.communicate(timeout=60)[0] == "True\n"
    finally:
        dead.kill()
        dead.wait()


@pytest.mark.soak
def test_a_forgotten_client_does_not_keep_its_process_from_ending(warm_spark, brewery):
    assert answer(client(warm_spark, brewery, close=False))["session"]


def test_a_run_closes_its_client_and_leaves_the_session_to_the_others(warm_spark):
    seen = []

    @dg.op
    def work(spark: SparkResource):
        assert engine.run(spark.spark_session, who, 1, ROWS).num_rows == 1
        seen.append(spark.spark_session)

    @dg.job(resource_defs={"spark": warm_spark.resource()})
    def brewing():
        work()

    assert brewing.execute_in_process().success
    assert brewing.execute_in_process().success

    first, second = seen
    assert first.is_stopped
    assert second.is_stopped
    assert first.session_id == second.session_id


def test_a_later_session_is_the_one_that_functions_of_spark_ask_for_and_the_process_stays_as_it_was(warm_spark):
    path = list(sys.path)
    for _ in range(2):
        with closing(warm_spark.resource()) as spark:
            session = spark.spark_session
            assert type(session)._get_default_session() is session
            spark.warm_up()

    assert sys.path == path
    assert "SPARK_CONNECT_MODE_ENABLED" not in os.environ


def test_a_run_that_needs_no_spark_opens_none(warm_spark):
    @dg.op
    def idle(spark: SparkResource):
        assert spark._held is None

    @dg.job(resource_defs={"spark": SparkResource(remote="sc://nowhere.invalid:1")})
    def resting():
        idle()

    assert resting.execute_in_process().success


def test_equal_resources_share_this_process_s_session_and_others_are_refused(warm_spark):
    with closing(warm_spark.resource()) as first:
        with closing(warm_spark.resource()) as second:
            assert second.spark_session is first.spark_session
        assert not first.spark_session.is_stopped, "the first resource is still using it"
        with (
            pytest.raises(RuntimeError, match="one session per process"),
            closing(warm_spark.resource("brewery")) as other,
        ):
            _ = other.spark_session


def test_a_server_by_address_takes_its_token_from_the_environment(warm_spark, monkeypatch):
    monkeypatch.setenv("BREWERY_TOKEN", warm_spark.server.token)
    named = SparkResource(remote=warm_spark.server.address, token=dg.EnvVar("BREWERY_TOKEN"))

    with dg.build_resources({"spark": named}) as resources:
        assert resources.spark.spark_session.version.startswith("4")
        assert warm_spark.server.token not in repr(named)


@pytest.mark.parametrize(
    ("remote", "way_out"),
    [("sc://localhost:1/;token=secret", "dg.EnvVar"), ("localhost:15002", "sc://host:port"), ("hot", "`warm`")],
)
def test_an_invalid_remote_is_refused_with_a_fix(remote, way_out):
    with pytest.raises(pydantic.ValidationError, match=way_out):
        SparkResource(remote=remote)


@pytest.mark.soak
def test_without_the_warm_server_a_run_starts_its_own_spark_and_ends_it(tmp_path):
    # In a separate process, because a JVM stays with the process that started it.
    ended = subprocess.run(
        [sys.executable, "-c", LOCAL, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])

    assert f"Found no warm Spark server in {tmp_path}" in ended.stderr
    assert told["rows"] == [0, 1, 2]
    assert told["config"] == "me"
    assert told["code"] == [True], "workers run the shipped code"
    assert told["error"].endswith("ValueError: sour")
    assert "org.apache.spark" not in told["error"]
    assert told["stopped"]
    assert not list(tmp_path.iterdir())


LOCAL = """
import json, sys
import pyarrow as pa
from pipeline_platform.spark import engine
from tests.spark.test_engine import ROWS, who
from pipeline_platform.orchestration.resources.spark_resource import SparkResource

config = {"spark.executorEnv.WHO": "me"}
spark = SparkResource(remote="warm", state_folder=sys.argv[1], cores=2, spark_config=config)
told = {"config": spark.spark_session.conf.get(*config)}

def task(index):
    import pipeline_platform.model.message
    shipped = ".zip" in pipeline_platform.model.message.__file__
    yield pa.RecordBatch.from_pylist([{"share": index, "shipped": shipped}], schema=ROWS)

def sour(index):
    raise ValueError("sour")
    yield

rows = engine.run(spark.spark_session, task, 3, ROWS)
told["rows"] = rows["share"].to_pylist()
told["code"] = rows["shipped"].unique().to_pylist()
try:
    engine.run(spark.spark_session, sour, 1, ROWS)
except engine.TaskError as error:
    told["error"] = str(error)

session = spark.spark_session
spark.close()
told["stopped"] = session._jsc.sc().isStopped()
print(json.dumps(told))
"""
