"""Processor time of a picture of `pipeline-platform dashboard`, with a short and with a long history.

Run it as `python -m benchmarks.dashboard`. It fills the control store with acknowledged receives of three days, Dagster
with runs and reports, and the lake with open failures in many windows, for three pipelines with SQLite and local files.
It prints the processor seconds of the first picture, and the mean of five further pictures, one every five seconds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import pyarrow as pa
import sqlalchemy as sa
from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, TableBatcher
from pipeline_platform.cli.dashboard.gathering import Gatherer
from pipeline_platform.cli.loading import Deployment
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.limits import SECOND, TABLES
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED, Table
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.windows import window_key
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.reports.stage_figures import STAGES, StageFigures, metadata_of_stages

PIPELINES, PICTURES, EVERY_S = 3, 5, 5.0


class History(NamedTuple):
    """Sizes of a history: of each pipeline, receives, runs with reports, and windows with a failure."""

    receives: int
    runs: int
    windows: int


HISTORIES = History(100, 10, 1), History(260_000, 200, 1_441)


class Order(BaseModel):
    """An order."""

    number: int


def pipeline(number: int) -> type[Pipeline]:
    """Return a pipeline."""

    class Orders(Pipeline):
        """A pipeline."""

        name = f"orders_{number}"
        producer = Producer(source=f"queue_{number}")
        batchers = {"orders": TableBatcher(schema=Order)}

        def handle_message(self, message: Message, context: object) -> Message:
            """Never called."""
            return message

    return Orders


def fill(place: Deployment, instance: dg.DagsterInstance, of: type[Pipeline], history: History) -> None:
    """Fill the stores with the history of a pipeline."""
    now, ended = datetime.now(UTC), TABLES.tables["control_ended"]
    step_us = round(3 * 86_400 * SECOND / history.receives)
    at = round(now.timestamp() * SECOND)
    rows = [
        (
            f"{of.name}-{number}",
            of.name,
            f"run-{number // 600}",
            20,
            at - number * step_us - SECOND,
            at - number * step_us,
        )
        for number in range(history.receives)
    ]
    place.control.in_flight(of.name)  # creates the tables
    with place.control.writing() as connection:
        for first in range(0, len(rows), 5_000):
            some = [dict(zip(ended.c.keys(), row, strict=True)) for row in rows[first : first + 5_000]]
            connection.execute(sa.insert(ended), some)
    tags = RunTags.of(of)
    for number in range(history.runs):
        run = dg.DagsterRun(
            job_name=f"{of.name}_pull",
            status=dg.DagsterRunStatus.SUCCESS,
            tags={tags.origin: "source", tags.demand: "20"},
        )
        instance.add_run(run)
        stages = {"handle": StageFigures(1, 20, 0, 0.1, 0.1)}
        figures: dict[str, Any] = metadata_of_stages(stages, {1.0: 20})
        figures |= {"received": 20, "failed": 1, "receive_id": f"{of.name}-{number}"}
        assert STAGES in figures
        instance.report_runless_asset_event(dg.AssetMaterialization([of.name, "messages"], metadata=figures))
    table = Table(place.lake, of.name, "failed", FAILED)
    table.ensure()
    columns = FAILED.remove(FAILED.get_field_index("window"))
    event = {"source": "queue", "attempt": 1, "state": "open", "kind": "ValueError", "at": now, "receive_id": "r"}
    events = [
        (
            "failed",
            window_key(now - timedelta(hours=number)),
            pa.Table.from_pylist([{**event, "message_id": f"m{number}", "reason": f"no price: {number}"}], columns),
        )
        for number in range(history.windows)
    ]
    with table.look() as handle:
        table.swap(handle, "r", write_rows(place.lake, of.name, "r", events))


@contextmanager
def deployment(history: History) -> Iterator[tuple[Deployment, dg.DagsterInstance]]:
    """Yield a deployment with a history."""
    with tempfile.TemporaryDirectory() as folder, dg.DagsterInstance.local_temp(folder) as instance:
        sources = {}
        for number in range(PIPELINES):
            name = f"queue_{number}"
            sources[name] = TableQueue(name=name, url=f"sqlite:///{folder}/{name}.sqlite", created_column="created_at")
            sources[name].create()
        control, pipelines = ControlStore(f"sqlite:///{folder}/control.sqlite"), map(pipeline, range(PIPELINES))
        lake = Lake(root=str(Path(folder) / "lake"))
        place = Deployment({each.name: each for each in pipelines}, control, lake, dict(sources))
        for each in place.pipelines.values():
            fill(place, instance, each, history)
        yield place, instance


def main() -> None:
    """Print the processor time of pictures."""
    print("receives      runs   windows   first, s   further, s")
    for history in HISTORIES:
        with deployment(history) as (place, instance):
            gatherer = Gatherer(place, instance, list(place.pipelines.values()))
            costs = []
            for _ in range(1 + PICTURES):
                began = time.process_time()
                gatherer.picture(60)
                costs.append(time.process_time() - began)
                time.sleep(EVERY_S)
            first, *further = costs
            sizes = f"{history.receives:>8,}  {history.runs:>8,}  {history.windows:>8,}"
            print(f"{sizes}   {first:>8.2f}   {statistics.mean(further):>10.2f}")


if __name__ == "__main__":
    main()
