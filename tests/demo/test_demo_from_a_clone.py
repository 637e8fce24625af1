"""First commands in a new clone of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from demo.place import PROJECT

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (shutil.which("make") and shutil.which("git")), reason="no make, or no git"),
    pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="not in a clone that could be cloned"),
]
# Variables that `make soak` and an active virtual environment pass on, and that a login shell does not have.
OURS = ("VIRTUAL_ENV", "CI", "PYTHON", "PYTHONPATH", "SOURCE", "FLIGHTS", "PORT", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")


@pytest.fixture
def clone(tmp_path):
    subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(tmp_path / "clone")], check=True)
    return tmp_path / "clone"


def make(clone: Path, *given: str) -> str:
    """Return the output of make, which must succeed."""
    path = os.environ["PATH"].split(os.pathsep)
    login = {name: value for name, value in os.environ.items() if name not in OURS}
    login["PATH"] = os.pathsep.join(folder for folder in path if Path(folder) != Path(sys.prefix) / "bin")
    made = subprocess.run(["make", *given], cwd=clone, env=login, capture_output=True, text=True, check=False)
    assert made.returncode == 0, f"{made.stdout[-6_000:]}\n{made.stderr[-6_000:]}"
    return made.stdout


def test_a_clone_works_with_its_own_commands(clone):
    told = make(clone, "help")
    for target in ("demo", "dev", "test", "soak", "check", "format", "bench", "setup"):
        assert re.search(rf"^  make {target} +\S", told, re.MULTILINE), told
    assert not (clone / ".venv").exists(), "help needs no set-up"
    said = make(clone, "demo", "FLIGHTS=2000")
    assert "The figures add up" in said
    assert (clone / ".demo" / "demo.png").exists()
    make(clone, "check")
    told = subprocess.run(["git", "status", "--short"], cwd=clone, capture_output=True, text=True, check=True).stdout
    assert told == "", "what these commands make is nothing to commit"
