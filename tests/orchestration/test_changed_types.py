"""A model whose field changed its type: refused when definitions load, by the check `columns`, and by `status`."""

import dagster as dg
import pyarrow as pa
import pytest
from pydantic import BaseModel

from pipeline_platform import TableBatcher
from pipeline_platform.cli import status_command
from pipeline_platform.lake.refused_changes import SchemaChangeError
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import SYSTEM, Table
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.run_checks import run_checks
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Told

SAID = "typed/lines: a: integer in the table, text in the model"


class Line(BaseModel):
    a: str


class Typed(Told):
    name = "typed"
    batchers = {"lines": TableBatcher(schema=Line)}


@pytest.fixture
def lake(tmp_path):
    lake = Lake(root=str(tmp_path / "lake"))
    Table(lake, "typed", "lines", pa.schema([("a", pa.int64()), *SYSTEM])).ensure()
    return lake


def test_definitions_of_a_lake_in_a_folder_do_not_load(lake, tmp_path, monkeypatch):
    resources = resources_at(str(tmp_path), "nowhere")
    assert resources["lake"].root == lake.root

    with pytest.raises(SchemaChangeError, match=SAID):
        platform_definitions([Typed], resources)


def test_the_check_of_its_table_fails(lake):
    *_, columns = run_checks(Typed)

    result = columns(dg.build_asset_check_context(resources={"lake": lake}))

    assert not result.passed
    assert result.description.startswith(SAID)


def test_status_names_it(lake):
    (said,) = status_command._columns(lake, Typed).values()
    assert str(said).startswith(SAID)
