"""Where dead letters may go: to a source that takes messages, and that the pipeline does not pull from."""

from typing import Any

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.source_resources import source_resource
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.memory_sources import MemoryQueue
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.small_lake import Memory


def dead_letters_to(key: str) -> Any:
    """The definitions of a pipeline with dead letters, beside sources of all kinds."""
    resources = {
        **resources_at("nowhere", "nowhere"),
        "told_dead": source_resource(TableQueue)(name="dead", url="sqlite:////nowhere/dead.sqlite"),
        "mute": source_resource(Memory)(name="mute"),
        "memory": source_resource(MemoryQueue)(name="memory", queue="q"),
        "alias": resources_at("nowhere", "nowhere")["queue"],
    }
    pipeline = type("Lettered", (Told,), {"name": "lettered", "dead_letters": key})
    return platform_definitions([pipeline], resources)


@pytest.mark.parametrize("key", ["told_dead", "memory"])
def test_every_step_has_the_source_that_dead_letters_go_to(key: str) -> None:
    job = dead_letters_to(key).resolve_job_def("lettered_pull")

    assert all(key in op.definition.required_resource_keys for op in job.graph.nodes[0].definition.nodes)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("told_daed", "no resource has this key; did you mean 'told_dead'?"),
        ("lake", "that resource is no source"),
        ("mute", r"Memory has no send\(\)"),
        ("queue", "the pipeline pulls from it"),
        ("alias", "the pipeline pulls from it"),
    ],
)
def test_where_they_cannot_be_sent_is_refused_when_definitions_load(key: str, why: str) -> None:
    with pytest.raises(PipelineError, match=rf"Lettered.dead_letters is '{key}': {why}"):
        dead_letters_to(key)
