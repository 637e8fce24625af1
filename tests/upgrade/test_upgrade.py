"""State of an earlier release that was stopped during work; `make_earlier` documents and creates it."""

import shutil
from collections import Counter
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.launcher import WorkerStatus

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.launcher.run_launcher import StandbyRunLauncher
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Producer, RateLimiting
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import Phase, ReceiveState
from tests.fixtures.flow import WINDOW, flow_of, rows, run
from tests.fixtures.small_lake import WINDOW as EARLIER
from tests.fixtures.small_lake import Keeping, Row

ALL = {
    f"{kind} {number}.{at}" for number in range(6) for at in range(1, 11) for kind in [("good", "fail")[at in (4, 7)]]
}
FAIL = {text for text in ALL if text.startswith("fail")}


class Orders(Keeping):
    """The upgraded pipeline."""

    name = "orders"
    producer = Producer(source="orders_queue")


class Mended(Orders):
    """The same pipeline after a fix: all messages succeed."""

    def handle_message(self, message, context):
        return message.put_batcher("kept").put_data(Row(text=message.data.decode()))


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "Zoë's lake: a=b + c"
    shutil.unpack_archive(Path(__file__).with_name("earlier.tar.xz"), folder)  # Python 3.11.2 knows no filter
    return folder / "earlier"


@pytest.fixture
def queue(home):
    return TableQueue(name="orders_queue", url=f"sqlite:///{home}/queue.sqlite", created_column="created_at")


@pytest.fixture
def flow(home, queue, tasks_here):
    return flow_of(home, Orders, queue)


def open_failures(flow: Flow) -> int:
    return sum(FailedMessages(name="orders_queue", lake=flow.lake, pipeline="orders").chosen_by_window().values())


def kept(flow: Flow) -> list[str]:
    return rows(flow, "kept")["text"].to_list()


def test_an_upgrade_loses_nothing_and_doubles_nothing(flow, queue):
    queue.check_ready()
    assert queue.backlog().messages == 50, "ten messages are acknowledged, and all leases have expired"
    phases = [ReceiveState(flow, receive_id).phase for receive_id in flow.ledger.unfinished()]
    assert sorted(phases) == [Phase.BEGUN, Phase.LEASED, Phase.BATCHED, Phase.DECIDED, Phase.PUBLISHED]

    assert flow.control.paused("orders") == "an upgrade"
    assert flow.control.rate_limiting("orders", None) == RateLimiting(
        allowed_messages=500, interval=timedelta(seconds=1)
    )
    assert run(flow).demand == 0, "a pause holds"
    flow.control.resume("orders")
    while queue.backlog().messages:
        run(flow)

    assert Counter(kept(flow)) == Counter(ALL - FAIL)
    assert open_failures(flow) == len(FAIL)
    assert (queue.held(), flow.ledger.unfinished(), flow.control.in_flight("orders")) == ([], [], [])

    mended = Flow(BoundProducer(Mended), queue, flow.lake, flow.control, flow.session)
    run(mended, origin="failed", windows=[EARLIER, WINDOW])
    assert Counter(kept(flow)) == Counter(ALL)
    assert open_failures(flow) == 0

    for name in ("kept", "failed"):  # compaction puts files of both releases together
        assert flow.tables[name].open().optimize.compact()["numFilesRemoved"] > 1
    run(mended, origin="messages", windows=[EARLIER, WINDOW])
    assert Counter(kept(flow)) == Counter(ALL)
    decided = rows(flow, "outcomes").filter(outcome="handled")
    assert decided.height == decided.n_unique(["source", "message_id"]) == len(ALL)


def test_dagster_opens_its_home_and_asks_after_runs_of_the_earlier_release(home):
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        runs = {run.run_id[-1]: run for run in instance.get_runs()}
        assert {number: run.status.value for number, run in runs.items()} == {
            **dict.fromkeys("01234", "STARTED"), "5": "SUCCESS",
        }  # fmt: skip
        health = instance.run_launcher.check_run_worker_health(runs["3"])
    assert type(instance.run_launcher) is StandbyRunLauncher
    assert health.status is not WorkerStatus.FAILED, "this host cannot check a process of another"
