"""Where runs are killed and stalled: a place with a filled source, and what must hold there in the end."""

import json
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import polars as pl
from sqlalchemy import create_engine, text

from pipelines.local_servers import sqs
from resources.sqs import SqsSource
from resources.table_queue import TableQueue
from tests import fault_run
from tests.fault_run import LEASE_S, Place
from tests.numbers_under_fault import Numbers, expected
from tests.processes import PROCESSES
from tests.spark_fixtures import WarmSpark


@dataclass(frozen=True)
class Ground:
    """A place for runs, and how much its source still holds."""

    place: Place
    left: Callable[[], int]
    blind: bool = False

    def start(self, point: str = "", blow: int = signal.SIGKILL, origin: str = "source") -> BaseProcess:
        told = {"point": point, "blow": blow, "origin": origin, "blind": self.blind}
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


def filled_sqs(folder: Path, spark: WarmSpark, queue_url: str, endpoint: str, count: int, visibility: int) -> Ground:
    """A queue whose messages are visible again after `visibility` seconds; with 1 they are while their run lives."""
    source = SqsSource(name="queue", queue_url=queue_url, visibility_timeout=visibility, endpoint_url=endpoint)
    sqs.fill(queue_url, (json.dumps({"n": n}).encode() for n in range(count)))

    def left() -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        told = sqs.client(endpoint).get_queue_attributes(QueueUrl=queue_url, AttributeNames=names)["Attributes"]  # type: ignore[arg-type]
        return sum(int(told[name]) for name in names)  # type: ignore[index]

    return Ground(Place(str(folder), str(spark.folder), source, control_of(folder), dict(sqs.ENVIRONMENT)), left)


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
        repeated = [n for n, times in Counter(held[name]).items() if times > 1]
        assert not repeated, f"{name} holds {repeated} more than once; runs ended {ground.endings()}"
        assert set(held[name]) == numbers, f"{name} lacks {numbers - set(held[name])}; runs ended {ground.endings()}"
    decided = rows["outcomes"].filter(pl.col("outcome").is_in(["handled", "failed"]))
    assert decided.height == count + len(closed_ids(rows)), "each message is decided once, at each attempt"


def closed_ids(rows: dict[str, pl.DataFrame]) -> list[str]:
    """The failures that a backfill brought home."""
    return rows["failed"].filter(pl.col("state") == "closed")["message_id"].to_list()


def twice(ground: Ground) -> list[int]:
    """The numbers that a table holds more than once."""
    lake = Path(ground.place.root, "lake", Numbers.name)
    held = [Counter(pl.read_delta(str(lake / name))["n"].to_list()) for name in ("numbers", "thirds")]
    return [n for counted in held for n, times in counted.items() if times > 1]
