"""The job `<pipeline>_limits`, which changes a pipeline's pause, rate limit and options from the UI."""

from collections.abc import Callable
from datetime import timedelta

import dagster as dg
from pydantic import Field

from pipeline_platform.control.drain import drain
from pipeline_platform.control.limits import changed_limit
from pipeline_platform.control.overrides import check_overrides
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Overrides
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.orchestration.runs.receive_config import without_variables

_OVERRIDES = Overrides.model_fields
_ACTS = ("pause", "drain", "resume")


class LimitsConfig(dg.Config):
    """Changes to make. Unset fields change nothing."""

    pause: bool = Field(default=False, description="Pause: runs receive no more messages.")
    drain: bool = Field(
        default=False, description="Pause, stop the active runs, and wait until they have ended. Stays paused."
    )
    resume: bool = Field(default=False, description="Resume after a pause or a drain.")
    reason: str = Field(
        default="",
        description="Shown while the pipeline is paused or drained. A drain of a paused pipeline keeps its reason.",
    )
    allowed_messages: int | None = Field(default=None, description="Rate limit: messages per interval.")
    interval_s: float | None = Field(
        default=None, gt=0, le=36_500 * 86_400, description="Rate limit: length of an interval in seconds."
    )
    concurrency: int | None = Field(default=None, description=_OVERRIDES["concurrency"].description)
    max_demand: int | None = Field(default=None, description=_OVERRIDES["max_demand"].description)
    max_runs: int | None = Field(default=None, description=_OVERRIDES["max_runs"].description)
    reset: bool = Field(default=False, description="First reset the rate limit and the options to those of the class.")
    producer: str = Field(default="", description="Name of a producer, to change this producer only.")


def limits_job(pipeline: type[Pipeline]) -> dg.JobDefinition:
    """Build the job `<pipeline>_limits`, the UI's equivalent of `pause`, `drain`, `resume`, `limit` and `scale`.

    It uses no Spark, and runs while the pipeline is paused.
    """

    @dg.op(
        name=f"{pipeline.name}__change_limits",
        description="Changes the pipeline's limits: a rate limit from the next permits on, options from the next run.",
        required_resource_keys={"control"},
        out=dg.Out(dg.Nothing),
    )
    def change_limits(context: dg.OpExecutionContext, config: LimitsConfig) -> None:  # noqa: ARG001 - for the launchpad
        plain = without_variables(LimitsConfig, context.run.run_config, ("ops", "change", "config"))
        change(pipeline, context.resources.control, plain, context.log.info, who=who(context.run))

    # Without this config, the launchpad would not show fields whose default is null.
    unset = LimitsConfig().model_dump()

    @dg.job(
        name=f"{pipeline.name}_limits",
        description="Pauses, drains or resumes the pipeline, or changes its limits.",
        executor_def=dg.in_process_executor,
        config={"ops": {"change": {"config": unset}}},
    )
    def job() -> None:
        change_limits.alias("change")()

    return job


def who(run: dg.DagsterRun) -> str:
    """Return a run for the history, with the user in its tags (Dagster+ sets it) or the sensor that requested it."""
    by = next(
        (run.tags[tag] for tag in ("user", "dagster/schedule_name", "dagster/sensor_name") if tag in run.tags), ""
    )
    return f"run {run.run_id}{by and f' of {by}'}"


def change(
    pipeline: type[Pipeline],
    control: ControlStore,
    config: LimitsConfig,
    log: Callable[[str], None],
    who: str = "Python",
) -> None:
    """Make all changes of a config, or none, and record them in the history.

    Raises:
        PipelineError: The producer is unknown, an option is not an option of a producer, a value is out of bounds, or
            several of `pause`, `drain` and `resume` are set.
    """
    producer = BoundProducer(pipeline, config.producer)
    acts = [act for act in _ACTS if getattr(config, act)]
    if len(acts) > 1:
        raise PipelineError(f"{producer.key}: {' and '.join(acts)} exclude each other. Set one of them to true")
    changes = Overrides(concurrency=config.concurrency, max_demand=config.max_demand, max_runs=config.max_runs)
    check_overrides(producer, changes)
    interval = None if config.interval_s is None else timedelta(seconds=config.interval_s)
    limits = config.allowed_messages is not None or interval is not None
    own, key = None, producer.key
    if limits:
        if producer.is_whole_pipeline:
            names = ", ".join(pipeline.producers)
            raise PipelineError(f"{key} has a rate limit per producer. Set producer to one of {names}")
        own = producer.options.rate_limiting
        before = own if config.reset else control.rate_limiting(key, own)
        changed_limit(key, before, config.allowed_messages, interval)  # refuses it before anything is changed
    if config.reset:
        control.reset_overrides(pipeline, config.producer)
        for each in producer.each:
            control.set_rate_limiting(each.key, None)
    if now := str(control.override(pipeline, changes, config.producer)):
        log(f"{key}: set at run time: {now}")
    if limits:  # only the given parts: another process may set the other part at the same moment
        control.update_rate_limiting(key, own, allowed_messages=config.allowed_messages, interval=interval)
    given = config.model_dump(exclude_defaults=True, exclude={"reason", "producer", *_ACTS})
    if given or acts:
        control.record_act(key, acts[0] if acts else "limits", who, config.reason, **given)
    reason = config.reason or "changed in Dagster"
    if config.pause:
        control.pause(key, reason)
        log(f"Paused {key}: {reason}")
    if config.resume:
        control.resume(key)
        still = control.paused(key)
        log(f"Resumed {key}" if still is None else f"{key} is still paused: {still}")
    if config.drain:
        reason = config.reason or control.paused(key) or reason
        log(drain(control, producer, reason, log=log))
