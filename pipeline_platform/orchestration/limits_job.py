"""What a pipeline may do, changed in the UI: the job `<pipeline>_limits`."""

from collections.abc import Callable
from datetime import timedelta
from enum import Enum

import dagster as dg
from pydantic import Field

from pipeline_platform.control.drain import drain
from pipeline_platform.control.overrides import check_overrides
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.options import Overrides, RateLimiting
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError

_OVERRIDES = Overrides.model_fields


class Activity(Enum):
    """Whether runs may take on messages."""

    unchanged = "unchanged"
    pause = "pause"
    drain = "drain"
    resume = "resume"


class LimitsConfig(dg.Config):
    """What is to change; what is unset stays as it is."""

    activity: Activity = Field(default=Activity.unchanged, description="`drain` waits until no run is running.")
    reason: str = Field(
        default="",
        description="Shown while the pipeline is paused or drained. A drain of a paused pipeline keeps its reason.",
    )
    allowed_messages: int | None = Field(default=None, description="Of the rate limit: messages in an interval.")
    interval_s: float | None = Field(
        default=None, gt=0, le=36_500 * 86_400, description="Of the rate limit: length of an interval."
    )
    concurrency: int | None = Field(default=None, description=_OVERRIDES["concurrency"].description)
    max_demand: int | None = Field(default=None, description=_OVERRIDES["max_demand"].description)
    max_runs: int | None = Field(default=None, description=_OVERRIDES["max_runs"].description)
    reset: bool = Field(default=False, description="First go back to the class's own rate limit and options.")
    producer: str = Field(default="", description="This producer only, where the pipeline has several.")


def limits_job(pipeline: type[Pipeline]) -> dg.JobDefinition:
    """Build the job `<pipeline>_limits`: pause, drain, resume, rate limit and overrides, as the command line has them.

    It needs no Spark, and obeys no pause.
    """

    @dg.op(
        name=f"{pipeline.name}__change_limits",
        description="Changes limits of the pipeline, from the next permits or the next run on.",
        required_resource_keys={"control"},
        out=dg.Out(dg.Nothing),
    )
    def change_limits(context: dg.OpExecutionContext, config: LimitsConfig) -> None:
        change(pipeline, context.resources.control, config, context.log.info)

    @dg.job(
        name=f"{pipeline.name}_limits",
        description="Pauses, drains, resumes or limits the pipeline.",
        executor_def=dg.in_process_executor,
    )
    def job() -> None:
        change_limits.alias("change")()

    return job


def change(pipeline: type[Pipeline], control: ControlStore, config: LimitsConfig, log: Callable[[str], None]) -> None:
    """Change what a config says, or nothing.

    Raises:
        PipelineError: There is no such producer, an option is not its own, or a value is out of bounds.
    """
    producers, key = pipeline.producers_of(config.producer), pipeline.limits_key(config.producer)
    changes = Overrides(concurrency=config.concurrency, max_demand=config.max_demand, max_runs=config.max_runs)
    check_overrides(pipeline, changes, config.producer)
    limit = _limit(pipeline, control, config)
    if config.reset:
        control.reset_overrides(pipeline, config.producer)
        for name in producers:
            control.set_rate_limiting(pipeline.limits_key(name), None)
    if now := str(control.override(pipeline, changes, config.producer)):
        log(f"{key}: set at run time: {now}")
    if limit is not None:  # not as checked: another part of it may be set at the same moment
        own = producers[config.producer].rate_limiting
        allowed, seconds = config.allowed_messages, config.interval_s
        interval = None if seconds is None else timedelta(seconds=seconds)
        control.update_rate_limiting(key, own, allowed_messages=allowed, interval=interval)
    reason = config.reason or "changed in Dagster"
    match config.activity:
        case Activity.pause:
            control.pause(key, reason)
            log(f"{key} is paused: {reason}")
        case Activity.resume:
            control.resume(key)
            still = control.paused(key)
            log(f"{key} is resumed" if still is None else f"{key} stays paused: {still}")
        case Activity.drain:
            reason = config.reason or control.paused(key) or reason
            log(drain(control, pipeline, reason, config.producer, log=log))


def _limit(pipeline: type[Pipeline], control: ControlStore, config: LimitsConfig) -> RateLimiting | None:
    """The rate limit that a config sets: what it leaves out is as it holds now. None where it changes none."""
    allowed, seconds, key = config.allowed_messages, config.interval_s, pipeline.limits_key(config.producer)
    if allowed is None and seconds is None:
        return None
    producers = pipeline.producers_of(config.producer)
    if config.producer not in producers:
        raise PipelineError(f"{key}: each producer has a rate limit of its own: choose one of {', '.join(producers)}")
    own = producers[config.producer].rate_limiting
    before = own if config.reset else control.rate_limiting(key, own)
    if before is None and (allowed is None or seconds is None):
        raise PipelineError(f"{key} has no rate limit to change a part of: set allowed_messages and interval_s")
    changed = {
        **(before.model_dump() if before else {}),
        **({} if allowed is None else {"allowed_messages": allowed}),
        **({} if seconds is None else {"interval": timedelta(seconds=seconds)}),
    }
    return RateLimiting(**changed)
