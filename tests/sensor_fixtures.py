"""A pipeline's sensor, and what it looks at: a queue, a control store and an instance."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets.tags import RunTags
from pipeline_platform.control.store import ControlStore
from pipeline_platform.deployment import platform_definitions
from pipeline_platform.model.options import Producer, RateLimiting
from pipeline_platform.model.pipeline import Pipeline
from resources.table_queue import TableQueue
from sensors import producer
from tests.jobs_under_test import resources_at
from tests.pipelines_under_test import Told


class Asked(Told):
    """One run takes 100, two may be under way; a run pays from 50."""

    name = "asked"


TAGS = RunTags.of(Asked)


class Limited(Told):
    """Ten a minute."""

    name = "limited"
    producer = Producer(
        source="queue", max_runs=2, rate_limiting=RateLimiting(allowed_messages=10, interval=timedelta(minutes=1))
    )


class Place:
    """A queue, a control store and an instance, and ticks on them."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.folder, self.instance, self.cursor = folder, instance, None
        self.queue = TableQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite", created_column="created_at")
        self.queue.create()
        self.control = ControlStore(f"sqlite:///{folder}/control.sqlite")

    def enqueue(self, count: int) -> None:
        self.queue.enqueue(b"x" for _ in range(count))

    def tick(self, pipeline: type[Pipeline] = Asked, source: TableQueue | None = None) -> Any:
        """What a tick of the sensor comes to; remembers its cursor, as the daemon does."""
        definitions = platform_definitions([pipeline], resources_at(str(self.folder), "nowhere"))
        context = dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursor,
            resources={"queue": source or self.queue, "control": self.control},
            definitions=definitions,
        )
        told = definitions.resolve_sensor_def(f"{pipeline.name}_producer").evaluate_tick(context)
        self.cursor = told.cursor or self.cursor
        return told

    def asked(self, pipeline: type[Pipeline] = Asked) -> list[int]:
        """The demands of the runs that a tick asks for, which are under way from then on."""
        requests = self.tick(pipeline).run_requests
        for request in requests:
            self.queued(request.tags)
        return [int(request.tags[RunTags.of(pipeline).demand]) for request in requests]

    def skips(self, pipeline: type[Pipeline] = Asked) -> str:
        """Why a tick asks for nothing."""
        told = self.tick(pipeline)
        assert not told.run_requests
        return str(told.skip_message)

    def queued(
        self,
        tags: Mapping[str, str],
        status: dg.DagsterRunStatus = dg.DagsterRunStatus.NOT_STARTED,
        **options: Any,
    ) -> dg.DagsterRun:
        run = dg.DagsterRun(job_name="any", status=status, tags=tags, **options)
        return self.instance.add_run(run)


@pytest.fixture
def place(tmp_path: Path, instance: dg.DagsterInstance) -> Place:
    for run in instance.get_runs():
        instance.delete_run(run.run_id)
    return Place(tmp_path, instance)


def tags(demand: int, **more: str) -> dict[str, str]:
    return {TAGS.origin: "source", TAGS.demand: str(demand), **more}


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Have the sensor look at a later time."""

    class Clock(datetime):
        ahead = timedelta(0)

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + cls.ahead

    monkeypatch.setattr(producer, "datetime", Clock)
    return lambda ahead: setattr(Clock, "ahead", ahead)
