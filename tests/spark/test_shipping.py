"""The zip of the project's code, and the id of its session."""

import os
import subprocess
import sys
import uuid
import zipfile
from pathlib import Path

import pytest

from pipeline_platform.spark import shipping


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An importable project with one package."""
    root = tmp_path / "project"
    package = root / "brewery"
    (package / "recipes").mkdir(parents=True)
    (package / "__init__.py").write_text("from brewery.recipes import ale\n")
    (package / "recipes" / "__init__.py").write_text("ale = 'ale'\n")
    (package / "recipes" / "grains.csv").write_text("barley,4\n")
    monkeypatch.syspath_prepend(str(root))
    return package


def names(code):
    with zipfile.ZipFile(code) as archive:
        return sorted(name for name in archive.namelist() if not name.endswith("/"))


def imported(code, script):
    """Return the output of a script that can import from the zip only."""
    program = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, sys.argv[1]); {script}", code]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout


def test_the_same_code_gives_the_same_bytes_whatever_the_checkout(project, tmp_path):
    first = shipping.pack(["brewery"], tmp_path / "first")
    for path in project.rglob("*.py"):
        os.utime(path, (1, 1_000_000_000))
        path.chmod(0o600)
    second = shipping.pack(["brewery"], tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()
    assert first.name == second.name


def test_an_edit_gives_another_name(project, tmp_path):
    before = shipping.pack(["brewery"], tmp_path / "zips")
    (project / "recipes" / "__init__.py").write_text("ale = 'pale ale'\n")
    after = shipping.pack(["brewery"], tmp_path / "zips")
    assert before.name != after.name, "Spark refuses a known name with other content"


def test_data_goes_along_and_caches_and_hidden_files_stay(project, tmp_path):
    (project / "__pycache__").mkdir()
    (project / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
    (project / ".swp").write_text("x")
    code = shipping.pack(["brewery"], tmp_path / "zips")
    assert names(code) == ["brewery/__init__.py", "brewery/recipes/__init__.py", "brewery/recipes/grains.csv"]


def test_single_modules_and_packages_without_init_can_be_shipped(project, tmp_path):
    root = project.parent
    (root / "cooper.py").write_text("barrels = 3\n")
    (root / "cellar" / "racks").mkdir(parents=True)
    (root / "cellar" / "racks" / "oak.py").write_text("bottles = 4\n")
    code = shipping.pack(["cooper", "cellar"], tmp_path / "zips")
    assert names(code) == ["cellar/racks/oak.py", "cooper.py"]
    assert imported(code, "import cooper, cellar.racks.oak; print(cellar.racks.oak.bottles, cooper.barrels)") == "4 3\n"


def test_the_order_of_packages_does_not_matter(project, tmp_path):
    (project.parent / "cooper.py").write_text("barrels = 3\n")
    first, second = (shipping.pack(order, tmp_path) for order in (["brewery", "cooper"], ["cooper", "brewery"]))
    assert first == second


@pytest.mark.parametrize(
    ("name", "reason"),
    [("no_such_brewery", "cannot be imported"), ("brewery.recipes", "Use 'brewery'"), ("sys", "no files")],
)
def test_names_that_cannot_be_shipped_are_refused(project, tmp_path, name, reason):
    with pytest.raises(ValueError, match=reason) as refusal:
        shipping.pack([name], tmp_path)
    assert name in str(refusal.value)
    assert not list(tmp_path.glob("*.zip"))


def test_the_platform_itself_can_be_shipped(tmp_path):
    shipped = names(shipping.pack([shipping.PLATFORM], tmp_path))
    assert "pipeline_platform/spark/engine.py" in shipped
    assert not [name for name in shipped if "demo" in name]
    assert not [name for name in shipped if name.startswith("/") or ".." in Path(name).parts]


def test_a_session_is_named_after_code_server_and_generation():
    name = shipping.session_id("digest", "started at noon")
    assert str(uuid.UUID(name)) == name
    assert name == shipping.session_id("digest", "started at noon")
    others = {
        shipping.session_id("edited", "started at noon"),
        shipping.session_id("digest", "started at one"),
        shipping.session_id("digest", "started at noon", generation=1),
    }
    assert len(others | {name}) == 4


BEERS = """
import json, pytest, malts
from strengths import STRONG

try:
    from .taps import TAP
except ImportError:
    TAP = 1


class Beer:
    def label(self):
        import labels
        from glasses.tall import Tall
"""


def test_a_class_is_shipped_with_its_imports_from_the_project_only(tmp_path, monkeypatch):
    elsewhere, installed = tmp_path / "elsewhere", tmp_path / "lib" / "site-packages"
    for folder, name, text in [
        (elsewhere, "malts", "import hops\nclass Malt: pass\n"),
        (installed, "hops", ""),
        (elsewhere, "unused", ""),
        (elsewhere, "strengths", "STRONG = 7\n"),
        (elsewhere, "labels", ""),
        (elsewhere / "glasses", "tall", "Tall = 1\n"),
        (tmp_path / "project", "beers", BEERS),
    ]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
    from beers import Beer  # type: ignore[import-not-found]

    assert shipping.packages_of([Beer]) == {"beers", "malts", "strengths", "labels", "glasses"}
