"""Output of `make` on a machine that lacks requirements of the set-up."""

import os
import shutil
import subprocess
import sys

import pytest

from demo.place import PROJECT

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="no make")

LACKING = """#!/bin/sh
case "$*" in "-c import ensurepip") echo "No module named 'ensurepip'" >&2; exit 1;; esac
exec {python} "$@"
"""


def test_a_missing_ensurepip_is_reported_with_its_package_before_anything_is_created(tmp_path):
    shutil.copy(PROJECT / "Makefile", tmp_path)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(LACKING.format(python=sys.executable))
    python.chmod(0o755)

    # Otherwise variables of `make test` would be passed on.
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    made = subprocess.run(
        ["make", "demo"],
        cwd=tmp_path,
        env={**kept, "PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHON": "python3"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert made.returncode, made
    assert f"apt-get install python3.{sys.version_info.minor}-venv" in made.stdout
    assert not (tmp_path / ".venv").exists()
