"""All checks of a deployment in order: packages, Dagster and code first, then the checks that need them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import dagster_instance, known
from pipeline_platform.cli.doctor.check import CheckState, DoctorOutput, Finding, Look, error, ok, run_all
from pipeline_platform.cli.loading import counted
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.strict_options import PipelineError

_LOADS_WITHIN_S = 60.0
"""Longest time to load the code of the deployment, if the checks may take less."""


class _Found:
    """Results of the first checks: the instance and the deployment, each None if it is not available."""

    instance: Any = None
    built: Any = None


def examine(within_s: float, looking_at: Callable[[str, str], object]) -> DoctorOutput:
    """Run all checks of the deployment of the command line, each within a time."""
    from pipeline_platform.cli.doctor import dagster_checks, service_checks  # noqa: F401 - the import takes seconds
    from pipeline_platform.cli.doctor.package_checks import packages

    with ExitStack() as stack:
        found = _Found()
        first: dict[str, Look] = {
            "packages": packages,
            "dagster": partial(_open_instance, stack, found),
        }
        results = run_all(first, within_s, looking_at)
        results += run_all({"code": partial(_load, found)}, max(within_s, _LOADS_WITHIN_S), looking_at)
        results += run_all({**_of_dagster(found), **_of_services(found, within_s)}, within_s, looking_at)
    state = max((result.state for result in results), key=list(CheckState).index)
    return DoctorOutput(state=state, checks=results)


def _open_instance(stack: ExitStack, found: _Found) -> Finding:
    from pipeline_platform.cli.doctor.dagster_checks import storage

    instance = stack.enter_context(dagster_instance())
    finding = storage(instance)
    found.instance = known(instance)
    return finding


def _load(found: _Found) -> Finding:
    name = ""
    try:
        name = loading.location_of().name
        found.built = loading.load()
    except (loading.SetUpError, PipelineError) as refused:
        return error(str(refused))
    except Exception as refused:  # of the project's code
        text = f"{name} cannot be loaded: {type(refused).__name__}: {refused}"
        return error(text, "Correct the code. `dagster definitions validate -w workspace.yaml` prints the traceback")
    return ok(f"{name}: {counted(len(found.built.pipelines), 'pipeline')}")


def _of_dagster(found: _Found) -> dict[str, Look]:
    if found.instance is None:
        return {}
    from pipeline_platform.cli.doctor import dagster_checks as checks

    instance, pipelines = found.instance, found.built.pipelines if found.built else ()
    return {
        "daemon": partial(checks.daemon, instance),
        "sensors": partial(checks.sensors, instance, pipelines),
        "run queue": partial(checks.run_queue, instance, pipelines),
        "run monitoring": partial(checks.run_monitoring, instance, pipelines),
        "run retries": partial(checks.run_retries, instance),
        "tick threads": partial(checks.ticks, instance, pipelines),
        "tick retention": partial(checks.retention, instance),
    }


def _of_services(found: _Found, within_s: float) -> dict[str, Look]:
    if found.built is None:
        return {}
    from pipeline_platform.cli.doctor import service_checks as checks

    built, instance = found.built, found.instance
    look = partial(checks.with_resource, built, instance)
    keys = [producer.source for pipeline in built.pipelines for producer in BoundProducer.all_of(pipeline)]
    keys += [pipeline.dead_letters for pipeline in built.pipelines if pipeline.dead_letters]

    def source(key: str) -> Finding:
        return look("control", lambda control: checks.source(key, built, control, instance))

    return {
        "control store": partial(look, "control", checks.control_store),
        "clock": partial(look, "control", checks.clock),
        "lake": partial(look, "lake", checks.lake),
        "spark": partial(look, "spark", partial(checks.spark, within_s=within_s)),
        **{f"source {key}": partial(source, key) for key in dict.fromkeys(keys)},
    }
