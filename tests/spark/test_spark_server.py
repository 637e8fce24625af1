"""The warm server: access, secrets, start and stop."""

import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from pyspark.sql.connect.proto import AnalyzePlanRequest, SparkConnectServiceStub
from typer.testing import CliRunner

from pipeline_platform.cli.errors import line_of
from pipeline_platform.cli.main import app
from pipeline_platform.home import home
from pipeline_platform.process import born
from pipeline_platform.spark import server as spark_server
from pipeline_platform.spark.server import SparkServerError
from tests.fixtures.kept_spark import SECRET


def ask_version(server, token):
    """Ask the server for its version with a token, by Spark's client without retries."""
    credentials = grpc.local_channel_credentials()
    if token:
        credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))
    request = AnalyzePlanRequest(session_id="00000000-0000-4000-8000-000000000000")
    request.spark_version.SetInParent()
    with grpc.secure_channel(f"localhost:{server.port}", credentials) as channel:
        return SparkConnectServiceStub(channel).AnalyzePlan(request, timeout=30).spark_version.version


@pytest.mark.parametrize("token", [None, "0" * 64], ids=["no token", "a wrong token"])
def test_a_client_without_the_token_is_refused(warm_spark, token):
    with pytest.raises(grpc.RpcError) as refusal:
        ask_version(warm_spark.server, token)

    assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert warm_spark.server.token not in str(refusal.value)
    assert ask_version(warm_spark.server, warm_spark.server.token)[0] == "4"


def test_everything_that_spark_listens_on_is_the_loopback_address(warm_spark):
    listening = listening_addresses(warm_spark.server.pid)

    assert warm_spark.server.port in {port for _, port in listening}
    assert {address for address, _ in listening} == {"127.0.0.1"}


def test_the_token_shows_neither_in_processes_nor_in_the_log_and_the_server_gets_no_secrets_of_its_starter(
    warm_spark, spark
):
    spark.warm_up()  # starts Python workers
    token = warm_spark.server.token
    processes = subprocess.run(["ps", "axww", "-o", "pid,args"], capture_output=True, text=True, check=True).stdout
    environments = [path.joinpath("environ").read_bytes() for path in Path("/proc").glob("[0-9]*") if is_spark(path)]

    assert str(warm_spark.server.pid) in processes
    assert token not in processes
    assert sum(b"SPARK_HOME" in environment for environment in environments) >= 2, "the server and its workers"
    assert not any(secret.encode() in environment for environment in environments for secret in (token, SECRET))
    assert token not in spark_server.log_tail(warm_spark.folder, lines=10_000)
    assert token not in repr(warm_spark.server)


def test_the_folder_and_files_with_the_token_are_private(warm_spark):
    assert stat.S_IMODE(warm_spark.folder.stat().st_mode) == 0o700
    holding = [
        path
        for path in warm_spark.folder.iterdir()
        if path.is_file() and warm_spark.server.token in path.read_text(errors="replace")
    ]

    assert [path.name for path in holding] == ["spark.json"]
    assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600
    assert stat.S_IMODE((warm_spark.folder / "spark.log").stat().st_mode) == 0o600


def test_starting_again_gives_the_running_one(warm_spark):
    assert spark_server.start(warm_spark.folder) == warm_spark.server
    assert spark_server.status(warm_spark.folder) == warm_spark.server


def test_a_server_that_dies_while_starting_is_told_with_the_end_of_its_log_and_the_log_before_is_kept(tmp_path):
    (tmp_path / "spark.log").write_text("why it died\n")
    with pytest.raises(spark_server.SparkServerError, match=r"(?s)crashed while starting.*maximum heap"):
        spark_server.start(tmp_path, memory="1k")

    assert spark_server.status(tmp_path) is None
    assert not (tmp_path / "spark.properties").exists(), "it holds the token"
    assert (tmp_path / "spark.log.1").read_text() == "why it died\n"
    assert "why it died" not in spark_server.log_tail(tmp_path)
    assert spark_processes(tmp_path) == []


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path):
    with pytest.raises(spark_server.SparkServerError, match=r"has not answered.*longer --timeout"):
        spark_server.start(tmp_path, timeout_s=0.3)

    assert spark_processes(tmp_path) == []


def test_a_process_that_got_the_id_of_a_dead_server_is_left_alone(tmp_path, warm_spark):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        write_state(tmp_path, replace(warm_spark.server, pid=stranger.pid))

        assert spark_server.status(tmp_path) is None
        assert not spark_server.stop(tmp_path)
        time.sleep(0.2)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_state_of_a_dead_process_is_stale_even_before_it_is_reaped(tmp_path, warm_spark):
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_state(tmp_path, replace(warm_spark.server, pid=ended.pid, born=born(ended.pid)))
    assert spark_server.status(tmp_path) is not None
    ended.kill()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped

    assert spark_server.status(tmp_path) is None
    ended.communicate()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_broken_state_file_means_no_server(tmp_path, text):
    (tmp_path / "spark.json").write_text(text)

    assert spark_server.status(tmp_path) is None


def test_a_state_file_that_others_may_write_is_refused(tmp_path, warm_spark):
    write_state(tmp_path, warm_spark.server)
    (tmp_path / "spark.json").chmod(0o666)

    for use in (spark_server.status, spark_server.start, spark_server.revive, spark_server.stop):
        with pytest.raises(spark_server.SparkServerError, match=r"spark\.json must belong to the user of this process"):
            use(tmp_path)
    assert spark_server.status(warm_spark.folder) == warm_spark.server


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_state_file_of_another_user_is_refused(tmp_path, warm_spark):
    write_state(tmp_path, warm_spark.server)
    os.chown(tmp_path / "spark.json", 65534, -1)

    answer = CliRunner().invoke(app, ["spark", "status", "--state", str(tmp_path)])

    assert isinstance(answer.exception, SparkServerError)
    assert "spark.json must belong to the user of this process" in line_of(answer.exception)


def test_everything_lies_in_one_folder_which_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPELINE_PLATFORM_HOME", raising=False)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    assert home() == tmp_path / ".pipeline_platform"
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    assert home() == tmp_path / "dagster" / "pipeline_platform"
    monkeypatch.setenv("PIPELINE_PLATFORM_HOME", str(tmp_path / "home"))
    assert home() == tmp_path / "home"


def test_the_command_line_finds_the_running_server(warm_spark, monkeypatch):
    monkeypatch.setenv("PIPELINE_PLATFORM_HOME", str(warm_spark.folder))

    for command in (["spark", "start", "--no-warm-up"], ["spark", "status"]):
        answer = CliRunner().invoke(app, command)
        assert answer.exit_code == 0, answer.output
        assert warm_spark.server.address in answer.output
        assert warm_spark.server.token not in answer.output


def test_the_command_line_says_that_there_is_no_server(tmp_path):
    answer = CliRunner().invoke(app, ["spark", "status", "--state", str(tmp_path)])

    assert answer.exit_code == 1
    assert str(tmp_path) in answer.output.replace("\n", "")


def write_state(folder, server):
    (folder / "spark.json").write_text(json.dumps(vars(server)))


def spark_processes(folder):
    """Return the processes of a state folder: the server and its Python workers."""
    found = subprocess.run(["ps", "axww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if str(folder) in line and "SparkConnect" in line]


def is_spark(process):
    try:
        arguments = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return b"SparkConnectServer" in arguments or b"preloading_daemon" in arguments


def listening_addresses(pid):
    """Return address and port of every listening TCP socket of a process; IPv4 inside IPv6 is IPv4."""
    sockets = psutil.Process(pid).net_connections("tcp")
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in sockets
        if connection.status == psutil.CONN_LISTEN
    }
