"""Run config of the previous release: queued runs of it keep working."""

import dagster as dg
import pytest

from pipeline_platform.orchestration.receive_config import ReceiveConfig, receive_config_of
from tests.fixtures.pipelines_under_test import Told


@pytest.mark.parametrize(
    ("given", "ignores", "warnings"),
    [
        ({}, False, 0),
        ({"ignore_pause": True}, True, 0),
        ({"although_paused": True}, True, 1),
        ({"although_paused": False}, False, 1),
        ({"although_paused": False, "ignore_pause": True}, True, 1),
    ],
)
def test_a_pause_is_ignored_by_the_new_and_the_old_name(given, ignores, warnings):
    logged: list[str] = []
    assert ReceiveConfig(**given).ignores_pause(logged.append) is ignores
    assert len(logged) == warnings
    assert all("Use `ignore_pause`" in text for text in logged)


@pytest.mark.parametrize("name", ["ignore_pause", "although_paused"])
def test_dagster_accepts_both_names(name):
    found = []

    @dg.op
    def receive(config: receive_config_of(Told)):
        found.append(config.ignores_pause(lambda _: None))

    @dg.job
    def job():
        receive()

    assert job.execute_in_process(run_config={"ops": {"receive": {"config": {name: True}}}}).success
    assert found == [True]
