"""What a pipeline may do, changed in the UI: the job `<pipeline>_limits`."""

from collections.abc import Callable
from datetime import timedelta
from enum import Enum

import dagster as dg
from pydantic import Field

from pipeline_platform.control.drain import drain
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.options import Overrides, PipelineError, RateLimiting
from pipeline_platform.model.pipeline import Pipeline

_OVERRIDES = Overrides.model_fields


class Activity(Enum):
    """Whether runs may take on messages."""

    unchanged = "unchanged"
    pause = "pause"
    drain = "drain"
    resume = "resume"


class LimitsConfig(dg.Config):
    """What is to change; what is unset stays as it is."""

    activity: Activity = Field(default=Activity.unchanged, description="`drain` waits until nothing is under way.")
    reason: str = Field(default="changed in Dagster", description="Of a pause or a drain: what people read meanwhile.")
    allowed_messages: int | None = Field(default=None, description="Of the rate limit: messages in an interval.")
    interval_s: float | None = Field(default=None, gt=0, description="Of the rate limit: length of an interval.")
    concurrency: int | None = Field(default=None, description=_OVERRIDES["concurrency"].description)
    max_demand: int | None = Field(default=None, description=_OVERRIDES["max_demand"].description)
    max_runs: int | None = Field(default=None, description=_OVERRIDES["max_runs"].description)
    reset: bool = Field(default=False, description="First have the class's own rate limit and options hold again.")
    producer: str = Field(default="", description="Of this producer alone, where the pipeline has several.")


def limits_job(pipeline: type[Pipeline]) -> dg.JobDefinition:
    """Build the job `<pipeline>_limits`: pause, drain, resume, rate limit and overrides, as the command line has them.

    It needs no Spark, and obeys no pause.
    """

    @dg.op(
        name=f"{pipeline.name}__change_limits",
        description="Changes what the pipeline may do, from the next permits or the next run on.",
        required_resource_keys={"control"},
        out=dg.Out(dg.Nothing),
    )
    def change_limits(context: dg.OpExecutionContext, config: LimitsConfig) -> None:
        change(pipeline, context.resources.control, config, context.log.info)

    @dg.job(name=f"{pipeline.name}_limits", description="Pauses, drains, resumes or limits the pipeline.")
    def job() -> None:
        change_limits.alias("change")()

    return job


def change(pipeline: type[Pipeline], control: ControlStore, config: LimitsConfig, log: Callable[[str], None]) -> None:
    """Change what a config says.

    Raises:
        PipelineError: There is no such producer, an option is not its own, or a value is out of bounds.
    """
    producers, key = pipeline.producers_of(config.producer), pipeline.limits_key(config.producer)
    changes = Overrides(concurrency=config.concurrency, max_demand=config.max_demand, max_runs=config.max_runs)
    span = None if config.interval_s is None else timedelta(seconds=config.interval_s)
    limits = (config.allowed_messages, span) != (None, None)
    if limits and config.producer not in producers:
        raise PipelineError(f"{key}: each producer has a rate limit of its own: choose one of {', '.join(producers)}")
    if config.reset:
        control.reset_overrides(pipeline, config.producer)
        for name in producers:
            control.set_rate_limiting(pipeline.limits_key(name), None)
    log(f"{key}: set at run time: {control.override(pipeline, changes, config.producer)}")
    if config.allowed_messages is not None and span is not None:
        limit = RateLimiting(allowed_messages=config.allowed_messages, interval=span)
        control.set_rate_limiting(key, limit)
    elif limits:
        own = producers[config.producer].rate_limiting
        control.update_rate_limiting(key, own, allowed_messages=config.allowed_messages, interval=span)
    match config.activity:
        case Activity.pause:
            control.pause(key, config.reason)
        case Activity.resume:
            control.resume(key)
        case Activity.drain:
            log(drain(control, pipeline, config.reason, config.producer, log=log))
