"""A `DummySource` loads in definitions, and keeps the promises of an empty source."""

import dagster as dg
import pytest

from pipeline_platform import Backlog, Refused, SourceError
from pipeline_platform.control.store import ControlStore
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.testing import DummySource, check_source
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Told

KEPT = [
    "columns_are_as_said", "shares_fit_the_tasks", "shares_say_their_size", "a_second_planner_gets_others",
    "closing_unused_is_harmless", "unknown_actions_are_refused",
]  # fmt: skip


def test_a_dummy_source_keeps_all_promises_that_need_no_message():
    for promise in KEPT:
        assert check_source(lambda: DummySource(name="dummy"), only=promise).kept == [promise]


def test_a_dummy_source_is_empty_and_refuses_acknowledgements_and_sent_messages():
    source = DummySource(name="dummy")
    assert (source.backlog(), source.plan(10, 2, "r")) == (Backlog(0), [])
    for action in ("ack", "nack:5"):
        assert source.acknowledge(action, "q", ["1"]) == [Refused("1", "a DummySource delivers no messages", lost=True)]
    with pytest.raises(SourceError, match=r"source 'dummy': DummySource does not support send\(\)"):
        source.send([b"1"])


def test_definitions_load_with_a_dummy_source_and_their_sensor_skips(tmp_path):
    resources = resources_at(str(tmp_path), "nowhere") | {"queue": source_resource(DummySource)(name="queue")}
    defined = platform_definitions([Told], resources)
    dg.Definitions.validate_loadable(defined)
    given = {"queue": DummySource(name="queue"), "control": ControlStore(f"sqlite:///{tmp_path}/control.sqlite")}
    with dg.DagsterInstance.ephemeral() as instance:
        tick = defined.resolve_sensor_def("told_producer").evaluate_tick(
            dg.build_sensor_context(instance=instance, resources=given, definitions=defined)
        )
    assert tick.skip_message.startswith("the queue is empty")
    assert tick.run_requests == []
