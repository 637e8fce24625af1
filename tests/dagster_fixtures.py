"""A Dagster instance of a test's own, with a queue, a lake and a control store beside it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from dagster._core.definitions.reconstruct import ReconstructableJob
from dagster._grpc.types import ExecuteRunArgs

from assets.jobs import receive_config
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.receives import Origin
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.flow import Flow
from tests.pipelines_under_test import PIPELINES, MoodyQueue, Told
from tests.spark_fixtures import WarmSpark

ROOT = Path(__file__).parents[1]
WINDOW = "2025-03-01T0000"
NEXT = "2025-03-01T0100"
LAST = "2025-03-01T0200"
_ORIGINS: dict[str, Origin] = {"pull": "source", "backfill": "failed", "replay": "messages"}


@dataclass(frozen=True)
class Location:
    """A code location at work in this process, on a real instance."""

    root: Path
    spark_folder: Path
    instance: dg.DagsterInstance
    queue: MoodyQueue
    control: ControlStore

    def run(
        self,
        job: str,
        *windows: str,
        context: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        again: dg.ReexecutionOptions | None = None,
        **options: str,
    ) -> dg.DagsterRun:
        """Run a job in this process; return the run as it ended.

        Args:
            job: Name of the job.
            windows: The window, or the first and the last of a range; `WINDOW` by default.
            context: Set in the run config, as is done in the launchpad.
            tags: More tags of the run.
            again: Which run it re-executes, and how.
            options: Of `job_at`.
        """
        result = dg.execute_job(
            self._job(job, options),
            self.instance,
            run_config=_config(job, context),
            tags={**_partitions(windows, job), **(tags or {})},
            reexecution_options=again,
        )
        return self.stored(result.run_id)

    def start(self, job: str, *windows: str, **context: Any) -> subprocess.Popen[bytes]:
        """Run a job in a process of its own, as Dagster's launchers do; it exits with 0 if the run succeeds."""
        reconstructable = self._job(job, {})
        run = self.instance.create_run_for_job(
            reconstructable.get_definition(),
            run_config=_config(job, context),
            tags=_partitions(windows, job),
            job_code_origin=reconstructable.get_python_origin(),
        )
        command = ExecuteRunArgs(
            job_origin=reconstructable.get_python_origin(),
            run_id=run.run_id,
            instance_ref=self.instance.get_ref(),
            set_exit_code_on_failure=True,
        ).get_command_args()
        command = [sys.executable, "-m", *command]  # of this environment, whatever is on the path
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stored(self, run_id: str) -> dg.DagsterRun:
        """A run as it is now."""
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def _job(self, name: str, options: Mapping[str, str]) -> ReconstructableJob:
        place = {"name": name, "root": str(self.root), "spark_folder": str(self.spark_folder)}
        return dg.build_reconstructable_job(
            "tests.jobs_under_test", "job_at", (), {**place, **options}, reconstructor_working_directory=str(ROOT)
        )

    def again(self, run: dg.DagsterRun, *, from_failure: bool, copied_tags: bool = True) -> dg.DagsterRun:
        """Re-execute a run, with its tags copied as the UI does."""
        how = (
            dg.ReexecutionOptions.from_failure(run.run_id, self.instance)
            if from_failure
            else dg.ReexecutionOptions(parent_run_id=run.run_id)
        )
        stored = self.stored(run.run_id)
        window = stored.tags["dagster/partition"]
        return self.run(stored.job_name, window, tags=stored.tags if copied_tags else None, again=how)

    def enqueue(self, *payloads: str) -> None:
        """Put messages into the queue."""
        self.queue.enqueue(payload.encode() for payload in payloads)

    def waiting(self) -> int:
        """How many messages the queue would give out."""
        return self.queue.backlog().messages or 0

    def rows(self, table: str, pipeline: str = "told") -> pl.DataFrame:
        """A table as any Delta reader sees it."""
        return pl.read_delta(str(self.root / "lake" / pipeline / table))

    def texts(self, table: str = "lines") -> list[str]:
        """What a table holds, sorted."""
        rows = self.rows(table)
        found = rows["text"] if "text" in rows.columns else [json.loads(data)["text"] for data in rows["data"]]
        return sorted(found)

    def open_failures(self, *windows: str, pipeline: type[Pipeline] = Told) -> dict[str, int]:
        """Failures that wait, by window."""
        return self.flow(pipeline)._failures(windows or [WINDOW, NEXT, LAST]).open_by_window()

    def flow(self, pipeline: type[Pipeline] = Told) -> Flow:
        """The pipeline without Spark, to look at its tables and receives."""

        def none() -> Any:
            raise AssertionError("this needs Spark")

        return Flow(pipeline, self.queue, Lake(root=str(self.root / "lake")), self.control, none)

    def materialisations(self, run: dg.DagsterRun, table: str, pipeline: str = "told") -> list[dg.AssetMaterialization]:
        """What a run told of a table, in order."""
        logs = self.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
        events = [entry.asset_materialization for entry in logs]
        return [event for event in events if event and event.asset_key == dg.AssetKey([pipeline, table])]

    def observations(self, run: dg.DagsterRun, table: str, pipeline: str = "told") -> list[dg.AssetObservation]:
        """What a run told of a table that it had materialised before, in order."""
        logs = self.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
        events = [entry.asset_observation for entry in logs]
        return [event for event in events if event and event.asset_key == dg.AssetKey([pipeline, table])]

    def checks(self, run: dg.DagsterRun) -> dict[str, Any]:
        """The check evaluations of a run, by name."""
        logs = self.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        found = [entry.dagster_event.asset_check_evaluation_data for entry in logs if entry.dagster_event]
        return {evaluation.check_name: evaluation for evaluation in found}

    def log(self, run: dg.DagsterRun) -> str:
        """Everything that the run's log says, errors and their causes included."""
        return "\n".join(
            entry.to_json() if hasattr(entry, "to_json") else str(entry) for entry in self.instance.all_logs(run.run_id)
        )


def _partitions(windows: Sequence[str], job: str) -> dict[str, str]:
    if job.split("_")[1] not in _ORIGINS:
        return {}
    first, last = (windows[0], windows[-1]) if windows else (WINDOW, WINDOW)
    if first == last:
        return {"dagster/partition": first}
    return {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}


def _config(job: str, context: Mapping[str, Any] | None) -> dict[str, Any]:
    name, kind = job.split("_")
    if kind not in _ORIGINS:
        return {}
    pipeline = PIPELINES[name]
    config: dict[str, Any] = receive_config(pipeline, _ORIGINS[kind])
    if context:
        config["ops"][name]["ops"]["receive_messages"]["config"]["context"] = dict(context)
    return config


def figures(event: dg.AssetMaterialization | dg.AssetObservation) -> dict[str, Any]:
    """Metadata as plain values."""
    return {name: value.value for name, value in event.metadata.items()}


@pytest.fixture(scope="module")
def open_spark(warm_spark: WarmSpark) -> Iterator[None]:
    """Keep this process's session open over the runs of a module, which would each open their own."""
    with closing(warm_spark.resource()) as resource:
        assert resource.spark_session
        yield


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """An instance on disk, shared by the tests of a module: making one takes as long as a run."""
    home = tmp_path_factory.mktemp("dagster")
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}")
    with dg.DagsterInstance.from_config(str(home)) as made:
        yield made


def empty_location(folder: Path, spark: WarmSpark, instance: dg.DagsterInstance) -> Location:
    """A location whose data lies in a folder, with an empty queue."""
    queue = MoodyQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite", created_column="created_at")
    queue.create()
    return Location(folder, spark.folder, instance, queue, ControlStore(f"sqlite:///{folder}/control.sqlite"))


@pytest.fixture
def location(
    tmp_path: Path, warm_spark: WarmSpark, open_spark: None, instance: dg.DagsterInstance
) -> Iterator[Location]:
    """A location whose queue is empty."""
    made = empty_location(tmp_path, warm_spark, instance)
    yield made
    made.control.close()
