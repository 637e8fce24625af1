"""The wheel in a foreign Dagster project, as `docs/start/your-project.md` shows."""

import json
import os
import pickle
import re
import subprocess
import zipfile

import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from tests.fixtures.keeper import PROJECT

DOCUMENT = (PROJECT / "docs" / "start" / "your-project.md").read_text()
FILES = re.findall(r"```python\n# (\S+)\n(.*?)```", DOCUMENT, re.S)
THEIRS = ("assets", "pipelines", "resources", "sensors")
"""Top-level packages of the project."""

CONNECTOR = """
class TableQueue(Shipped):
    pass
"""

WORK = """
import assets, dagster as dg, pipeline_platform, pipelines, resources, sensors
from our_project.definitions import defs
from pipeline_platform.orchestration.resources.source_resources import connector_of

assert {one.OWNER for one in (assets, pipelines, resources, sensors)} == {"theirs"}
assert pipeline_platform.__file__.startswith(%r), pipeline_platform.__file__
assert connector_of(defs.resources["orders_queue"]).__module__ == "our_project.connectors.table"
pulls, sensor = defs.resolve_job_def("orders_pull"), defs.resolve_sensor_def("orders_producer")
whole = defs.resolve_implicit_global_asset_job_def()
assert (pulls.executor_def, whole.executor_def) == (dg.in_process_executor, dg.multiprocess_executor)
with dg.DagsterInstance.get() as instance:
    looked_at = {key: defs.resources[key] for key in sensor.required_resource_keys}
    with dg.build_sensor_context(instance=instance, definitions=defs, resources=looked_at) as look:
        (asked,) = sensor.evaluate_tick(look).run_requests
    assert pulls.execute_in_process(asked.run_config, instance, asked.partition_key, tags=asked.tags).success
    assert whole.execute_in_process(instance=instance, asset_selection=[dg.AssetKey("turnover")]).success
"""


def test_the_wheel_holds_one_package(wheel):
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pipeline_platform"}


@pytest.mark.faults
def test_a_project_with_packages_of_the_same_names_runs_a_pipeline(environment, tmp_path):
    project, lake, queue_url = tmp_path / "project", tmp_path / "lake", f"sqlite:///{tmp_path}/queue.sqlite"
    for name, text in FILES:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    # A connector of the project, in a package without `__init__.py` like `our_project`.
    queues = project / "our_project" / "queues.py"
    shipped = "from pipeline_platform.connectors.table_queue import TableQueue"
    (project / "our_project" / "connectors").mkdir()
    (project / "our_project" / "connectors" / "table.py").write_text(f"{shipped} as Shipped\n{CONNECTOR}")
    queues.write_text(queues.read_text().replace(shipped, "from our_project.connectors.table import TableQueue"))
    for name in THEIRS:
        (project / name).mkdir()
        (project / name / "__init__.py").write_text('OWNER = "theirs"\n')
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}")
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "DAGSTER_HOME": str(home),
        "ORDERS_QUEUE": queue_url,
        "PLATFORM_LAKE": str(lake),
        "PLATFORM_CONTROL": f"sqlite:///{tmp_path}/control.sqlite",
    }

    def call(command: str, *arguments: str) -> None:
        program = [environment / command, *arguments]
        done = subprocess.run(
            program, cwd=project, env=variables, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-6_000:]

    call("pipeline-platform", "-m", "our_project.definitions", "table-queue", "create", "orders_queue")
    queue = TableQueue(name="orders_queue", url=queue_url)
    queue.send([json.dumps({"number": number, "total": 1.5}).encode() for number in range(6_000)] + [b"no order"])

    call("python", "-c", WORK % str(environment.parent))

    rows = pl.read_delta(str(lake / "orders" / "lake"))
    assert sorted(rows["number"]) == list(range(6_000))
    assert pl.read_delta(str(lake / "orders" / "failed"))["data"].to_list() == [b"no order"]
    assert queue.backlog().messages == 0
    assert pickle.loads((home / "storage" / "turnover").read_bytes()) == 9_000.0, "stored as that project stores"
