"""Number of requests of a run to an object store."""

import pyarrow as pa

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.reader import RowRange, read_ranges
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import run
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.s3 import counting, lake_on
from tests.fixtures.small_lake import WINDOW, Keeping, put


def test_a_run_makes_as_many_requests_however_many_were_before_it(tasks_here, tmp_path, own_s3_server):
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    control, lake = ControlStore(f"sqlite:///{tmp_path}/control.sqlite"), lake_on(own_s3_server)
    made = []
    for number in range(13):
        queue.enqueue([b"one", b"two"])
        with counting(own_s3_server) as requests:
            run(
                Flow(BoundProducer(Told), queue, lake, control, lambda: None), run_id=str(number)
            )  # as a process of its own has it
        made.append(len(requests()))

    assert made[9] < made[7], "a checkpoint came between"
    assert max(made[9:]) <= 140


def test_a_small_file_is_read_in_two_requests(own_s3_server):
    tables, files = Tables(lake_on(own_s3_server), Keeping), 12
    tables.ensure()
    for number in range(files):
        of_message = {"source": "memory", "message_id": f"m{number}", "attempt": 1}
        put(tables["outcomes"], f"r{number}", {**of_message, "outcome": "failed"})
        put(tables["failed"], f"r{number}", {**of_message, "state": "open"})
    outcomes = tables["outcomes"]
    with outcomes.look() as handle:
        ranges = [RowRange(outcomes.path(f.path), f.window, 0, f.rows, 0) for f in outcomes.files(handle)]

    with counting(own_s3_server) as requests:
        columns = pa.schema([("outcome", pa.string())])
        rows = [batch for _, batch in read_ranges(tables.lake, ranges, columns, 65_536)]
        looked_up = len(requests())
    with counting(own_s3_server) as requests:
        failures = FailedMessages(name="memory", lake=tables.lake, pipeline="keeping").by_window()
        counted = [request for request in requests() if "/window=" in request]

    assert (sum(map(len, rows)), failures[WINDOW].open) == (files, files)
    assert (looked_up, len(counted)) == (2 * files, 2 * files)
