"""Tests of how the command line finds the deployment: `workspace.yaml`, a project of `dg`, `-m`."""

import sys

import pytest

from pipeline_platform.cli import loading


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("load_from: [", "line 1"),
        ("load_from: 3", "load_from"),
        ("- a", "load_from"),
        ("load_from: [{python_module: {x: 1}}]", "load_from"),
    ],
)
def test_a_workspace_that_cannot_be_read_is_named_in_a_line(tmp_path, monkeypatch, text, where):
    (tmp_path / "workspace.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    loading.choose(None)
    with pytest.raises(loading.SetUpError, match=f"^workspace.yaml is invalid at .*{where}"):
        loading.load()


BOTH = """
load_from:
  - python_file: {relative_path: east/defs.py, working_directory: east, location_name: east}
  - python_file: west.py
"""


@pytest.mark.parametrize(("named", "module"), [("east", "defs"), ("defs", "defs"), ("west.py", "west"), ("x", "x")])
def test_a_location_is_found_by_its_name_or_its_module(tmp_path, monkeypatch, named, module):
    (tmp_path / "workspace.yaml").write_text(BOTH)
    monkeypatch.chdir(tmp_path)
    assert loading.location_of(named).module == module
    with pytest.raises(loading.SetUpError, match=r"contains 2 code locations \(east, west.py\)"):
        loading.location_of(None)


@pytest.mark.parametrize(
    ("project", "module", "name"),
    [
        ('root_module = "ours"', "ours.definitions", "shop"),
        ('root_module = "ours"\ncode_location_target_module = "defs"\ncode_location_name = "east"', "defs", "east"),
    ],
)
def test_without_a_workspace_a_project_of_dg_is_the_deployment(tmp_path, monkeypatch, project, module, name):
    (folder := tmp_path / "shop").mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(loading.SetUpError, match=r"shop contains no deployment: "):
        loading.location_of(None)
    (folder / "pyproject.toml").write_text(f"[tool.dg.project]\n{project}")

    assert loading.location_of(None) == loading.location_of(module) == loading.location_of(name)
    assert loading.location_of(None)[:2] == (module, name)
    assert loading.location_of("elsewhere")[:2] == ("elsewhere", "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(loading.SetUpError, match="module elsewhere does not exist in "):
        loading.load("elsewhere")


def test_the_only_file_that_calls_platform_definitions_is_the_deployment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders.py").write_text("defs = platform_definitions([Orders])\n")
    (tmp_path / "test_orders.py").write_text("from orders import Orders  # not platform_definitions(\n")
    assert loading.location_of(None) == loading.Location("orders", "orders")

    (tmp_path / "returns.py").write_text("defs = platform_definitions([Returns])\n")
    with pytest.raises(loading.SetUpError, match=r"2 deployments \(orders, returns\)"):
        loading.location_of(None)
