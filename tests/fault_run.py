"""One run of a pipeline in a process of its own, to be killed or stalled at a point of its way."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake import decision
from pipeline_platform.lake.receives import Receive
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table
from pipeline_platform.run import flow as flow_module
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.spark_work import SparkWork
from pipeline_platform.source.contract import Source
from pipeline_platform.spark.shipping import PACKAGES
from resources.spark import WARM, SparkResource
from tests.numbers_under_fault import Numbers

LEASE_S = 2.0
WINDOW = "2026-11-21T0000"
POINTS = (
    "begun",
    "receiving",
    "received",
    "handling",
    "handled",
    "batched",
    "deciding",
    "decided",
    "one table published",
    "published",
    "half acknowledged",
    "acknowledging",
    "acknowledged",
)
"""Where a run can be hit, in the order of its way."""


@dataclass(frozen=True)
class Place:
    """Where runs work: everything but the code, picklable."""

    root: str
    spark_folder: str
    source: Source
    control: str
    environment: dict[str, str]

    def spark(self) -> SparkResource:
        """Spark, warm."""
        return SparkResource(remote=WARM, state_folder=self.spark_folder, packages=[*PACKAGES, "tests"])

    def flow(self, spark: SparkResource) -> Flow:
        """The pipeline in this place, in this process."""
        os.environ.update(self.environment)
        return Flow(
            pipeline=Numbers,
            source=self.source,
            lake=Lake(root=f"{self.root}/lake"),
            control=ControlStore(self.control),
            session=lambda: spark.spark_session,
        )


def run(
    place: Place,
    origin: Literal["source", "failed"] = "source",
    point: str = "",
    blow: int = signal.SIGKILL,
    blind: bool = False,
) -> None:
    """Run once from receive to acknowledgement; be hit at `point` by the signal `blow`.

    A `blind` run decides without a look at what others decided since it began: as without compare-and-swap.

    A record of how it ended is left in `<root>/runs/`: `ended`, or the error in words.
    """
    flow_module.LEASE_S = LEASE_S
    hit = _Hits(point, blow)
    if blind:
        Table.added_since = lambda *_: []  # type: ignore[method-assign]
    record = Path(place.root, "runs", f"{os.getpid()}.json")
    record.parent.mkdir(exist_ok=True)
    try:
        _steps(place.flow(place.spark()), origin, hit)
    except Exception as error:
        record.write_text(json.dumps({"point": point, "ended": f"{type(error).__name__}: {error}"[:2000]}))
    else:
        record.write_text(json.dumps({"point": point, "ended": "well"}))
    # A stalled or failing client must not linger for its server: leave as a killed process would.
    os._exit(0)


def _steps(flow: Flow, origin: Literal["source", "failed"], hit: _Hits) -> None:
    context = {"tenths_fail": False} if origin == "failed" else {}
    receive = flow.begin(origin=origin, run_id=str(os.getpid()), windows=[WINDOW], context=context)
    hit("begun")
    with hit.soon("receiving"):
        flow.receive(receive)
    hit("received")
    _go_on(flow, receive, hit)


def _go_on(flow: Flow, receive: Receive, hit: _Hits) -> None:
    with hit.soon("handling"):
        flow.handle(receive)
    hit("handled")
    flow.batch(receive, "thirds")
    hit("batched")
    swap = Table.swap

    def hit_before(*args: Any, **options: Any) -> None:
        hit("deciding")
        swap(*args, **options)

    with mock.patch.object(Table, "swap", hit_before):
        flow.decide(receive)
    hit("decided")
    publish_once = decision._publish_once

    def hit_after_one(*args: Any) -> None:
        publish_once(*args)
        hit("one table published")

    with mock.patch.object(decision, "_publish_once", hit_after_one):
        flow.publish(receive)
    hit("published")
    run_tasks = SparkWork.run

    def hit_after_acknowledging(work: SparkWork, task: Any, shares: int) -> Any:
        if hit.awaits("half acknowledged"):
            run_tasks(work, task, shares // 2)
            hit("half acknowledged")
        told = run_tasks(work, task, shares)
        hit("acknowledging")
        return told

    with mock.patch.object(SparkWork, "run", hit_after_acknowledging):
        flow.acknowledge(receive)
    hit("acknowledged")


class _Hits:
    def __init__(self, point: str, blow: int) -> None:
        self._point, self._blow = point, blow

    def __call__(self, point: str) -> None:
        if point == self._point:
            self._point = ""
            os.kill(os.getpid(), self._blow)

    def awaits(self, point: str) -> bool:
        return point == self._point

    def soon(self, point: str) -> _Soon:
        return _Soon(lambda: self(point))


class _Soon:
    """Hits while the step works: a little after it began, and on a fast machine as it ends."""

    def __init__(self, hit: Callable[[], None]) -> None:
        self._hit, self._done = hit, threading.Event()

    def __enter__(self) -> None:
        def wait() -> None:
            if not self._done.wait(0.1):
                self._hit()

        threading.Thread(target=wait, daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        if kind is None:
            self._hit()


def execute_again(place: Place) -> None:
    """Re-execute the later steps of the one run that is not finished, as from the UI, whatever that run still does."""
    flow_module.LEASE_S = LEASE_S
    with closing(place.spark()) as spark:
        flow = place.flow(spark)
        (receive_id,) = flow.receives.unfinished()
        receive = flow.receives.get(receive_id)
        assert receive is not None
        _go_on(flow, flow.resume(receive, "another run"), _Hits("", 0))


def drive_failures(place: Place) -> None:
    """Run a backfill without faults."""
    flow_module.LEASE_S = LEASE_S
    with closing(place.spark()) as spark:
        _steps(place.flow(spark), "failed", _Hits("", 0))


def settle(place: Place, left: Callable[[], int], deadline_s: float = 90.0) -> None:
    """Run without faults until the source holds nothing and no receive is unfinished."""
    flow_module.LEASE_S = LEASE_S
    end = time.monotonic() + deadline_s
    with closing(place.spark()) as spark:
        flow = place.flow(spark)
        while time.monotonic() < end:
            _steps(flow, "source", _Hits("", 0))
            if not left() and not flow.receives.unfinished():
                return
            time.sleep(0.3)
    raise AssertionError(f"after {deadline_s} s {left()} messages are left, and {flow.receives.unfinished()}")
