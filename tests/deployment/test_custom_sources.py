"""Sources of `docs/connect/your-own.md`, checked as the page describes."""

import importlib
import re
import sys
from pathlib import Path

import dagster as dg
import pytest

from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.source.contract import Source
from pipeline_platform.sql.database import Database

DOCUMENT = Path(__file__).parents[2] / "docs" / "connect" / "your-own.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Return the Python of the document as one module, because its classes are pickled by their names."""
    (tmp_path / "sources_of_the_document.py").write_text("\n\n".join(BLOCKS))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sources_of_the_document", raising=False)
    return vars(importlib.import_module("sources_of_the_document"))


@pytest.mark.parametrize("name", ["Counter", "Trackings"])
def test_its_sources_have_about_forty_lines(name):
    (text,) = [block.partition(f"class {name}(")[2] for block in BLOCKS if f"class {name}(" in block]
    assert len([line for line in text.splitlines() if line.strip()]) <= 42


def test_its_sources_are_dagster_s_resources(shown, tmp_path):
    resource = source_resource(shown["Trackings"])(name="trackings", path=str(tmp_path / "trackings.sqlite"))
    with dg.build_resources({"trackings": resource}) as resources:
        made: Source = resources.trackings
    assert made == shown["Trackings"](name="trackings", path=tmp_path / "trackings.sqlite")


def test_database_has_its_earlier_place_too():
    assert importlib.import_module("pipeline_platform.control.database").Database is Database
