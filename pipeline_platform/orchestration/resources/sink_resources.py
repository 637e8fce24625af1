"""Sinks as Dagster resources."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import dagster as dg

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.resources.addresses import QUIET
from pipeline_platform.orchestration.resources.source_resources import given_options, resource_class
from pipeline_platform.sinks.contract import Sink


@functools.cache
def sink_resource(sink: type[Sink]) -> type[dg.ConfigurableResource[Sink]]:
    """Return a resource class for a sink, with the same fields. Text options accept a `dg.EnvVar`.

    Example::

        "warehouse": sink_resource(PostgresSink)(name="warehouse", url=dg.EnvVar("WAREHOUSE_URL"))
    """

    class _SinkResource(dg.ConfigurableResource[Sink]):
        model_config = QUIET
        sink_class: ClassVar[type[Sink]] = sink

        @contextmanager
        def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Sink]:
            made = sink(**given_options(self, sink))
            yield made
            made.close()

    return resource_class(sink, _SinkResource)


def sink_keys(pipeline: type[Pipeline]) -> dict[str, str]:
    """Return the keys of a pipeline's sinks, by batcher."""
    return {name: batcher.sink for name, batcher in pipeline.batchers.items() if batcher.sink is not None}
