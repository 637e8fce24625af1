"""A run that is killed, or whose server is away, wherever it is: each message once in every table, and nothing lost."""

import os
import signal
from pathlib import Path

import pytest

from servers.server import Server
from tests.fixtures import fault_run
from tests.fixtures.fault_ground import FILLED, Ground, assert_each_message_once, join
from tests.fixtures.fault_run import POINTS
from tests.fixtures.processes import wait_until_stopped
from tests.fixtures.spark import WarmSpark

pytestmark = pytest.mark.faults
COUNT = 200

SERVERS = ["kafka", "rabbitmq", pytest.param("pubsub", marks=pytest.mark.soak)]


@pytest.fixture
def ground(request: pytest.FixtureRequest, tmp_path: Path, warm_spark: WarmSpark, server: str) -> Ground:
    """A session's server, filled."""
    return FILLED[server](tmp_path, warm_spark, request.getfixturevalue(f"{server}_server"), COUNT)


AT_A_SOURCE = [
    point
    if point not in ("handled", "batched", "deciding", "one table published")
    else pytest.param(point, marks=pytest.mark.soak)
    for point in POINTS
]
"""At the others a run has asked the source for nothing since the point before: `test_faults.py` hits it there."""


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("point", AT_A_SOURCE)
def test_what_a_killed_run_left_is_completed_by_the_next(ground: Ground, point: str) -> None:
    killed = ground.start(point)
    join(killed)

    fault_run.run_to_end(ground.place, ground.left)

    assert killed.exitcode == -signal.SIGKILL, "the run was not hit: the point is gone"
    assert_each_message_once(ground, COUNT)


@pytest.mark.soak
@pytest.mark.parametrize("server", FILLED)
@pytest.mark.parametrize("point", ["begun", "receiving", "received", "deciding", "half acknowledged", "acknowledging"])
def test_a_server_that_restarts_while_a_run_is_at_a_point_costs_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, warm_spark: WarmSpark, server: str, point: str
) -> None:
    own: Server = request.getfixturevalue(f"own_{server}_server")
    ground = FILLED[server](tmp_path, warm_spark, own.address, COUNT)
    run = ground.start(point, signal.SIGSTOP)
    try:
        wait_until_stopped(run)
        own.stop()
        os.kill(run.pid or 0, signal.SIGCONT)
        own.start()
        join(run, within_s=120)
    finally:
        run.kill()  # stopped for good, if the test failed before it woke

    fault_run.run_to_end(ground.place, ground.left)

    assert_each_message_once(ground, COUNT)
