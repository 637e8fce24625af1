"""The tags of a run: what each pipeline was asked for in it, and what it received."""

from __future__ import annotations

from typing import NamedTuple, get_args

import dagster as dg

from pipeline_platform.lake.ledger import Origin
from pipeline_platform.model.pipeline import Pipeline


class RunTags(NamedTuple):
    """The keys of one pipeline's tags. A run may carry several pipelines, so each has keys of its own.

    Attributes:
        origin: Where the run takes the pipeline's messages from; on every run that is known to be the pipeline's.
        demand: How many messages it was asked for, then how many it took on.
        receive_id: What it leased: by it, ops and the run that re-executes them find what earlier ones wrote.
        published: On a red run of which all is published and acknowledged: its own id, for re-executions copy tags.
    """

    origin: str
    demand: str
    receive_id: str
    published: str

    @classmethod
    def of(cls, pipeline: type[Pipeline]) -> RunTags:
        """The keys for a pipeline."""
        return cls(*(f"pipeline_platform.{field}/{pipeline.name}" for field in cls._fields))


def runs_of(pipeline: type[Pipeline], statuses: list[dg.DagsterRunStatus]) -> dg.RunsFilter:
    """Filter a pipeline's runs of some statuses."""
    return dg.RunsFilter(tags={RunTags.of(pipeline).origin: get_args(Origin)}, statuses=statuses)
