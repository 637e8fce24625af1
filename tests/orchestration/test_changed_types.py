"""A model with a changed type of a field: sensors, the check `columns` and `status` report that runs are refused."""

from contextlib import closing

import dagster as dg
import pyarrow as pa
import pytest
from pydantic import BaseModel

from pipeline_platform import Producer, TableBatcher
from pipeline_platform.cli.status.status_gathering import pipeline_status
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.schema_changes import SchemaChangeError
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import SYSTEM, Table
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration import source_resource
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.jobs import run_request
from pipeline_platform.orchestration.reports.run_checks import run_checks
from tests.fixtures.dashboards import deployment
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import MoodyQueue, Told

SAID = "typed/lines: a: integer in the table, text in the model"


class Line(BaseModel):
    a: str


class Typed(Told):
    name = "typed"
    batchers = {"lines": TableBatcher(schema=Line)}


class Fitting(Told):
    name = "fitting"
    producer = Producer(source="other")


@pytest.fixture
def lake(tmp_path):
    lake = Lake(root=str(tmp_path / "lake"))
    Table(lake, "typed", "lines", pa.schema([("a", pa.int64()), *SYSTEM])).ensure()
    return lake


def test_its_pipeline_alone_gets_no_runs_until_it_fits(lake, tmp_path, monkeypatch):
    resources = resources_at(str(tmp_path), "nowhere")
    assert resources["lake"].root == lake.root
    other = source_resource(MoodyQueue)(name="other", url=f"sqlite:///{tmp_path}/other.sqlite")

    with pytest.warns(UserWarning, match=f"Runs of typed are refused: {SAID}"):
        definitions = platform_definitions([Typed, Fitting], {**resources, "other": other})

    assert {"typed_pull", "fitting_pull"} <= {job.name for job in definitions.resolve_all_job_defs()}
    sensor = definitions.resolve_sensor_def("typed_producer")
    used = {name: resources[name] for name in ("queue", "control")}
    with (
        dg.DagsterInstance.ephemeral() as instance,
        dg.build_sensor_context(instance, resources=used) as context,
        pytest.raises(SchemaChangeError, match=SAID),
    ):
        sensor.evaluate_tick(context)
    with pytest.raises(SchemaChangeError, match=SAID):
        run_request(BoundProducer(Typed), "failed", ["2025-01-01T0000"], 1)
    assert run_request(BoundProducer(Fitting), "failed", ["2025-01-01T0000"], 1).partition_key == "2025-01-01T0000"

    monkeypatch.setattr(Typed, "batchers", {})
    platform_definitions([Typed], resources)
    assert run_request(BoundProducer(Typed), "failed", ["2025-01-01T0000"], 1).partition_key == "2025-01-01T0000"


def test_the_check_of_its_table_fails(lake):
    *_, columns = run_checks(Typed)

    result = columns(dg.build_asset_check_context(resources={"lake": lake}))

    assert not result.passed
    assert result.description.startswith(SAID)


def test_status_names_it(lake, tmp_path):
    queue = MoodyQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()

    with closing(ControlStore(f"sqlite:///{tmp_path}/control.sqlite")) as control:
        status = pipeline_status(deployment(tmp_path, control, Typed, queue=queue), Typed, "no instance")

    (said,) = status.changed_types.values()
    assert said.startswith(SAID)
    assert said in [problem.text for problem in status.problems if problem.kind == "changed_types"]
