"""Summary and exit code of a test session, and the second run of failed tests."""

import os
import subprocess
import sys

import pytest

from tests.fixtures.keeper import PROJECT

TESTS = """
import pytest
from pathlib import Path

def flaky(number):
    seen = Path(__file__).with_name(f"seen{{number}}")
    was_seen = seen.exists()
    seen.touch()
    assert was_seen

def test_passes(): pass
@pytest.mark.parametrize("number", range({failing}))
def test_of_a_busy_machine(number): {body}
@pytest.mark.faults
def test_kill(): pass
@pytest.mark.faults
@pytest.mark.soak
def test_long(): pass
"""


@pytest.mark.parametrize(
    ("failing", "body", "ended", "closing"),
    [
        (0, "pass", 0, "1 passed, 1 skipped in"),
        (10, "flaky(number)", 0, "10 failed in parallel, passed alone"),
        (1, "assert False", 1, "1 failed, 1 passed"),
        (11, "flaky(number)", 1, "11 failed, 1 passed"),
    ],
    ids=["none", "ten that pass alone", "one that fails alone", "more than ten"],
)
def test_a_few_tests_that_fail_together_run_again_alone(tmp_path, failing, body, ended, closing):
    (tmp_path / "test_it.py").write_text(TESTS.format(failing=failing, body=body))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  faults\n  soak\n")
    command = ["-m", "pytest", "-p", "tests.fixtures.ending", "-n", "1", "-m"]
    environment = {**os.environ, "CI": "true", "PYTHONPATH": str(PROJECT)}

    done = subprocess.run(
        [sys.executable, *command, "not soak and not faults"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    lines = done.stdout.splitlines()
    assert done.returncode == ended, done.stdout
    assert closing in lines[-1]
    assert "Tests left to `make faults`: 1 " in done.stdout
    assert ("passed alone: test_it.py::test_of_a_busy_machine[0]" in done.stdout) == ("passed alone" in closing)
