"""Whatever dies or stalls, wherever it is hit: each message once in every table, and nothing lost."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from sqlalchemy import create_engine, text

from pipelines.local_servers import sqs
from resources.sqs import SqsSource
from resources.table_queue import TableQueue
from tests import fault_run
from tests.fault_run import LEASE_S, POINTS, Numbers, Place, expected
from tests.spark_fixtures import WarmSpark

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.fault_run", "pyspark.sql.connect.session", "deltalake"])

COUNT = 200


@dataclass(frozen=True)
class Ground:
    """A place for runs, and how much its source still holds."""

    place: Place
    left: Callable[[], int]

    def start(self, point: str = "", blow: int = signal.SIGKILL, origin: str = "source") -> BaseProcess:
        told = {"point": point, "blow": blow, "origin": origin}
        process = PROCESSES.Process(target=fault_run.run, args=(self.place,), kwargs=told)
        process.start()
        return process

    def endings(self) -> list[dict[str, str]]:
        return [json.loads(path.read_text()) for path in Path(self.place.root, "runs").glob("*.json")]


def filled_table(folder: Path, spark: WarmSpark, count: int, url: str = "") -> Ground:
    """Queue and control store lie in one database: of its own folder, or of `url`."""
    queue = TableQueue(name="queue", url=url or f"sqlite:///{folder}/queue.sqlite", lease_s=LEASE_S)
    queue.create()
    queue.enqueue(json.dumps({"n": n}).encode() for n in range(count))
    database = create_engine(queue.url.replace("postgresql:", "postgresql+psycopg:"))

    def left() -> int:
        with database.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM messages")).scalar_one())

    return Ground(Place(str(folder), str(spark.folder), queue, control_of(folder, url), {}), left)


def control_of(folder: Path, url: str = "") -> str:
    return url or f"sqlite:///{folder}/control.sqlite"


def filled_sqs(folder: Path, spark: WarmSpark, queue_url: str, endpoint: str, count: int) -> Ground:
    source = SqsSource(name="queue", queue_url=queue_url, visibility_timeout=4, endpoint_url=endpoint)
    sqs.fill(queue_url, (json.dumps({"n": n}).encode() for n in range(count)))

    def left() -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        told = sqs.client(endpoint).get_queue_attributes(QueueUrl=queue_url, AttributeNames=names)["Attributes"]  # type: ignore[arg-type]
        return sum(int(told[name]) for name in names)  # type: ignore[index]

    return Ground(Place(str(folder), str(spark.folder), source, control_of(folder), dict(sqs.ENVIRONMENT)), left)


@pytest.fixture
def table(tmp_path: Path, warm_spark: WarmSpark) -> Ground:
    return filled_table(tmp_path, warm_spark, COUNT)


def join(process: BaseProcess, within_s: float = 60.0) -> None:
    process.join(within_s)
    assert not process.is_alive(), "a run hangs"


def assert_each_message_once(ground: Ground, count: int, *, tenths_fail: bool = True) -> None:
    lake = Path(ground.place.root, "lake", Numbers.name)
    rows = {name: pl.read_delta(str(lake / name)) for name in ("numbers", "thirds", "failed", "outcomes")}
    failed = rows["failed"].filter((pl.col("state") == "open") & ~pl.col("message_id").is_in(closed_ids(rows)))
    held = {name: rows[name]["n"].to_list() for name in ("numbers", "thirds")}
    held["failed"] = [json.loads(data)["n"] for data in failed["data"]]

    for name, numbers in expected(range(count), tenths_fail=tenths_fail).items():
        twice = [n for n, times in Counter(held[name]).items() if times > 1]
        assert not twice, f"{name} holds {twice} more than once; runs ended {ground.endings()}"
        assert set(held[name]) == numbers, f"{name} lacks {numbers - set(held[name])}; runs ended {ground.endings()}"
    decided = rows["outcomes"].filter(pl.col("outcome").is_in(["handled", "failed"]))
    assert decided.height == count + len(closed_ids(rows)), "each message is decided once, at each attempt"


def closed_ids(rows: dict[str, pl.DataFrame]) -> list[str]:
    """The failures that a backfill brought home."""
    return rows["failed"].filter(pl.col("state") == "closed")["message_id"].to_list()


@pytest.mark.parametrize("point", POINTS)
def test_what_a_killed_run_left_is_completed_by_the_next(table: Ground, point: str) -> None:
    killed = table.start(point)
    join(killed)

    fault_run.settle(table.place, table.left)

    assert killed.exitcode == -signal.SIGKILL, "the run was not hit: the point is gone"
    assert_each_message_once(table, COUNT)


@pytest.mark.parametrize("point", ["received", "handled", "decided", "one table published"])
def test_a_killed_backfill_drives_nothing_twice(table: Ground, point: str) -> None:
    fault_run.settle(table.place, table.left)
    killed = table.start(point, origin="failed")
    join(killed)

    fault_run.drive_failures(table.place)
    fault_run.settle(table.place, table.left)

    assert killed.exitcode == -signal.SIGKILL, "the run was not hit: the point is gone"
    assert_each_message_once(table, COUNT, tenths_fail=False)


STALLS = ["receiving", "received", "handling", "handled", "decided", "one table published", "half acknowledged"]


@pytest.mark.parametrize("point", STALLS)
def test_a_run_that_stalls_past_its_lease_does_no_harm_when_it_wakes(table: Ground, point: str) -> None:
    stalled = table.start(point, signal.SIGSTOP)
    wait_until_stopped(stalled)
    time.sleep(LEASE_S * 1.2)
    fault_run.settle(table.place, table.left)

    os.kill(stalled.pid or 0, signal.SIGCONT)
    join(stalled)
    fault_run.settle(table.place, table.left)

    assert_each_message_once(table, COUNT)


def wait_until_stopped(process: BaseProcess) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return
        time.sleep(0.05)
    raise AssertionError("the run was not stopped: the point is gone")


def storm(ground: Ground, seed: int, runs: int) -> None:
    """Keep four runs going; kill, or stall for longer than a lease, most of them at random."""
    chance = random.Random(seed)
    living: list[tuple[BaseProcess, float]] = []
    asleep: list[tuple[BaseProcess, float]] = []
    started = 0
    while started < runs or living or asleep:
        now = time.monotonic()
        while started < runs and len(living) + len(asleep) < 4:
            living.append((ground.start(), now + chance.uniform(0.3, 4.0)))
            started += 1
        for process, hit_at in list(living):
            if not process.is_alive():
                living.remove((process, hit_at))
            elif now >= hit_at:
                living.remove((process, hit_at))
                if chance.random() < 0.5:
                    process.kill()
                    process.join()
                else:
                    os.kill(process.pid or 0, signal.SIGSTOP)
                    asleep.append((process, now + LEASE_S * chance.uniform(0.5, 2.5)))
        for process, wake_at in list(asleep):
            if now >= wake_at:
                asleep.remove((process, wake_at))
                os.kill(process.pid or 0, signal.SIGCONT)
                living.append((process, now + chance.uniform(0.3, 6.0)))
        time.sleep(0.02)


def seeds(few: int, many: int) -> list[Any]:
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(few, many))]


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_a_storm_of_kills_and_stalls_over_a_table(tmp_path: Path, warm_spark: WarmSpark, seed: int) -> None:
    ground = filled_table(tmp_path, warm_spark, 1_500)

    storm(ground, seed, runs=10)
    fault_run.settle(ground.place, ground.left)

    assert_each_message_once(ground, 1_500)


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_a_storm_of_kills_and_stalls_over_postgresql(
    tmp_path: Path, warm_spark: WarmSpark, postgres_url: str, seed: int
) -> None:
    ground = filled_table(tmp_path, warm_spark, 1_500, postgres_url)

    storm(ground, seed, runs=10)
    fault_run.settle(ground.place, ground.left)

    assert_each_message_once(ground, 1_500)


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_a_storm_of_kills_and_stalls_over_sqs(
    tmp_path: Path, warm_spark: WarmSpark, sqs_server: sqs.Server, sqs_queue: Callable[..., str], seed: int
) -> None:
    ground = filled_sqs(tmp_path, warm_spark, sqs_queue(), sqs_server.url, 1_500)

    storm(ground, seed, runs=10)
    fault_run.settle(ground.place, ground.left)

    assert_each_message_once(ground, 1_500)
