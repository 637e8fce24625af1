"""Wheel of this checkout, and an environment with it."""

import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.fixtures.keeper import PROJECT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Build the wheel of this checkout from a copy, because a build leaves folders behind and uses existing ones."""
    folder = tmp_path_factory.mktemp("build")
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "tests", "docs")
    shutil.copytree(PROJECT, folder / "copy", ignore=hidden)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, "./copy"]
    subprocess.run(pip, cwd=folder, check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    """Return the scripts of a new environment with the wheel, and everything of the tests' environment but this
    checkout."""
    home = tmp_path_factory.mktemp("environment") / "new"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True, timeout=60)
    (packages,) = home.glob("lib/*/site-packages")
    # Python ignores .pth files in a folder that a .pth file adds, such as the .pth file of the editable installation.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin"
