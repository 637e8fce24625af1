"""A start that takes long is waited for as long as it gets on; one that stands still is ended."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline_platform.spark import jvm
from pipeline_platform.spark import server as spark_server

SLOW_JAVA = """#!/bin/sh
case "$*" in *SparkConnectServer*--properties-file*|*org.apache.spark.deploy.SparkSubmit*)
    end=$(($(date +%s) + {seconds}))
    while [ "$(date +%s)" -lt "$end" ]; do :; done ;;
esac
exec {java}/bin/java "$@"
"""


@pytest.fixture
def slow_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Java that works for six seconds before it does anything for Spark, and that says nothing of it."""
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text(SLOW_JAVA.format(seconds=6, java=jvm.ensure_java(tmp_path)))
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    spark_server.stop(tmp_path / "state")


@pytest.mark.soak
def test_a_slow_start_that_gets_on_is_waited_for_and_says_so(
    folder: Path, slow_java: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_server, "_STALLED_S", 3.0)
    monkeypatch.setattr(spark_server, "_LOG_EACH_S", 2.0)
    said: list[str] = []

    server = spark_server.start(folder, cores=1, log=said.append)

    assert server.java == str(slow_java)
    assert len(said) >= 2
    assert all(f"process {server.pid}" in line and str(folder) in line for line in said)


def test_a_start_that_stands_still_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_server, "_STALLED_S", 2.0)
    monkeypatch.setattr(spark_server, "_STOP_S", 0.5)  # it would not hear that it is asked to end

    def stand_still() -> None:
        while (server := spark_server._known(folder / "spark.starting.json")) is None:
            time.sleep(0.01)
        os.killpg(os.getpgid(server.pid), signal.SIGSTOP)

    stopper = threading.Thread(target=stand_still)
    stopper.start()
    with pytest.raises(spark_server.SparkServerError, match=r"has done nothing for 2 s"):
        spark_server.start(folder, cores=1)
    stopper.join()

    assert not (folder / "spark.starting.json").exists()
