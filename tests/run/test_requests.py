"""Number of requests of a run to an object store."""

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import run
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.s3 import counting, lake_on


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
