"""A producer together with its pipeline: the value that sensors, runs, the control store and the command line share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline_platform.model.options import Producer
from pipeline_platform.model.strict_options import PipelineError, did_you_mean

if TYPE_CHECKING:
    from pipeline_platform.model.pipeline import Pipeline


@dataclass(frozen=True)
class BoundProducer:
    """A producer of a pipeline; or without a name, if the pipeline has several producers, the whole pipeline.

    The whole pipeline has a key, which retries and replays claim capacity with, but no options and no source.

    Attributes:
        pipeline: The class.
        name: Name of the producer; empty for the only producer, and for the whole pipeline.

    Raises:
        PipelineError: The pipeline has no producer of this name.
    """

    pipeline: type[Pipeline]
    name: str = ""

    def __post_init__(self) -> None:
        """Check the name."""
        producers = self.pipeline.producers
        if self.name and self.name not in producers:
            only = "Leave the name out: its only producer has no name."
            hint = did_you_mean(self.name, producers, "producers") if producers else only
            raise PipelineError(f"{self.pipeline.name}: has no producer {self.name!r}. {hint}")

    @classmethod
    def all_of(cls, pipeline: type[Pipeline]) -> tuple[BoundProducer, ...]:
        """Return all producers of a pipeline, in the order of the class."""
        return tuple(cls(pipeline, name) for name in pipeline.producers or ("",))

    @property
    def is_whole_pipeline(self) -> bool:
        """Whether it is the whole pipeline, which has several producers."""
        return not self.name and bool(self.pipeline.producers)

    @property
    def each(self) -> tuple[BoundProducer, ...]:
        """The producer itself, or all producers of the whole pipeline."""
        return self.all_of(self.pipeline) if self.is_whole_pipeline else (self,)

    @property
    def options(self) -> Producer:
        """The options of the class, without changes at run time.

        Raises:
            PipelineError: It is the whole pipeline.
        """
        if self.is_whole_pipeline:
            names = ", ".join(self.pipeline.producers)
            raise PipelineError(f"{self.pipeline.name}: has several producers. Name one of {names}.")
        return self.pipeline.producers[self.name] if self.name else self.pipeline.producer

    @property
    def source(self) -> str:
        """Key of its source."""
        return self.options.source

    @property
    def key(self) -> str:
        """Key in the control store: the name of the pipeline, with the name of the producer if it has one."""
        return f"{self.pipeline.name}/{self.name}" if self.name else self.pipeline.name

    @property
    def prefix(self) -> str:
        """Prefix of the names of its sensors and schedules."""
        return self.key.replace("/", "_")

    @property
    def option(self) -> str:
        """The option of the class that contains it, for errors."""
        return f"producers[{self.name!r}]" if self.name else "producer"
