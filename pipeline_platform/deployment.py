"""The pipelines and resources of `pipeline_platform.definitions`, for the command line; Dagster need not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pipeline_platform.control import ControlStore
    from pipeline_platform.lake.storage import Lake
    from pipeline_platform.pipeline import Pipeline
    from pipeline_platform.source import Source


class SetUpError(Exception):
    """A resource of the definitions cannot be set up here; the message names what is missing."""


class UnknownPipelineError(Exception):
    """There is no pipeline of that name; the message says which there are."""


@dataclass(frozen=True)
class Deployment:
    """The pipelines that are defined, and what they share.

    Attributes:
        pipelines: By name.
        resources: By key, ready to use.
    """

    pipelines: dict[str, type[Pipeline]]
    resources: Any

    @property
    def control(self) -> ControlStore:
        """Limits, pauses and claims."""
        return cast("ControlStore", self.resources.control)

    @property
    def lake(self) -> Lake:
        """The tables."""
        return cast("Lake", self.resources.lake)

    def source(self, pipeline: type[Pipeline]) -> Source:
        """Where a pipeline's messages come from."""
        return cast("Source", getattr(self.resources, pipeline.producer.source))

    def chosen(self, name: str | None) -> Sequence[type[Pipeline]]:
        """One pipeline, or all.

        Raises:
            UnknownPipelineError: There is none of that name.
        """
        if name is None:
            return list(self.pipelines.values())
        if name not in self.pipelines:
            raise UnknownPipelineError(f"there is no pipeline {name!r}; there is {', '.join(self.pipelines)}")
        return [self.pipelines[name]]

    def receives(self, pipeline: type[Pipeline]) -> tuple[list[str], list[str]]:
        """The ids of receives that are not decided, and of those that are and not finished."""
        from pipeline_platform.lake.decision import decided
        from pipeline_platform.lake.receives import Receives
        from pipeline_platform.lake.tables import Tables

        kept, outcomes = Receives(self.lake, pipeline.name), Tables(self.lake, pipeline)["outcomes"]
        receives = [receive for receive_id in kept.unfinished() if (receive := kept.get(receive_id))]
        if not receives:
            return [], []
        handle = outcomes.open()
        undecided: list[str] = []
        unfinished: list[str] = []
        for receive in receives:
            (unfinished if decided(outcomes, handle, receive) else undecided).append(receive.receive_id)
        return undecided, unfinished

    def open_failures(self, pipeline: type[Pipeline]) -> dict[str, int]:
        """The failures that wait to be driven again, by window."""
        from pipeline_platform.lake.failed import FailedMessages

        name = self.source(pipeline).name
        return FailedMessages(name=name, lake=self.lake, pipeline=pipeline.name).open_by_window()


@contextmanager
def opened() -> Iterator[Deployment]:
    """Load the definitions and set up what the command line looks at; no Spark.

    Raises:
        SetUpError: A variable that a resource is configured by is not set, or a value is wrong.
    """
    import dagster as dg

    from pipeline_platform import definitions

    pipelines: dict[str, type[Pipeline]] = {pipeline.name: pipeline for pipeline in definitions.PIPELINES}
    keys = {"lake", "control", *(pipeline.producer.source for pipeline in pipelines.values())}
    chosen = {key: resource for key, resource in definitions.RESOURCES.items() if key in keys}
    with ExitStack() as set_up:
        try:
            resources = set_up.enter_context(dg.build_resources(chosen))
        except dg.DagsterInvalidConfigError as error:
            said = str(error).partition("Stack Trace:")[0].strip()
            raise SetUpError(f"the resources of pipeline_platform.definitions cannot be set up. {said}") from None
        yield Deployment(pipelines, resources)
