"""`acks_immediately` needs a source that tasks can tell of single messages."""

from typing import Any

import pytest

from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.source_resources import source_resource
from tests.fixtures.early import Early
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.memory_sources import MemoryChannel, MemoryLog, MemoryQueue


def early_from(source: type[Any]) -> Any:
    queue = source_resource(source)(name="queue", queue="q")
    return platform_definitions([Early], {**resources_at("nowhere", "nowhere"), "queue": queue})


def test_a_source_that_leases_messages_is_told_early() -> None:
    assert early_from(MemoryQueue).resolve_job_def("early_pull")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (MemoryLog, r"is a MemoryLog, which takes only positions"),
        (MemoryChannel, r"is a MemoryChannel, which only the run's own process acknowledges"),
    ],
)
def test_another_source_is_refused_when_definitions_load(source: type[Any], why: str) -> None:
    with pytest.raises(PipelineError, match=rf"Early.acks_immediately is True: producer.source 'queue' {why}"):
        early_from(source)
