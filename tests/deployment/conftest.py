"""The wheel, in an environment of its own."""

import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.fixtures.keeper import PROJECT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built from a copy: a build leaves folders behind, and uses what it finds there."""
    folder = tmp_path_factory.mktemp("build")
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "tests", "docs")
    shutil.copytree(PROJECT, folder / "copy", ignore=hidden)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, "./copy"]
    subprocess.run(pip, cwd=folder, check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    """The scripts of a new environment that has the wheel, and everything else but this checkout from the tests'."""
    home = tmp_path_factory.mktemp("environment") / "new"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True, timeout=60)
    (packages,) = home.glob("lib/*/site-packages")
    # Of a folder that a .pth file names, Python obeys no .pth file: not that of the editable installation.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin"
