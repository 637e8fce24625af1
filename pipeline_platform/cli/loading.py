"""The deployment that the command line works on: what `workspace.yaml` or `-m` names. Dagster need not run."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dotenv
import typer
import yaml

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.failure import reason_of
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.flow import Flow, looked_at
from pipeline_platform.source.contract import Source

if TYPE_CHECKING:
    from pipeline_platform.orchestration.deployment import Built

_CHOSEN: dict[str, str] = {}
"""What `-m` names, in this process."""


class SetUpError(Exception):
    """There is no deployment here, or a resource of it cannot be set up; the message names what is missing."""


@dataclass(frozen=True)
class Deployment:
    """The pipelines that are defined, and what they share.

    Pipelines are by name. Sources are by key: those that are pulled from, and those that dead letters are sent to.
    """

    pipelines: dict[str, type[Pipeline]]
    control: ControlStore
    lake: Lake
    sources: dict[str, Source]

    def pipeline(self, name: str) -> type[Pipeline]:
        """One pipeline; a `BadParameter` if there is none of that name."""
        if name not in self.pipelines:
            unknown = f"there is no pipeline {name!r}; there is {', '.join(self.pipelines) or 'none'}"
            raise typer.BadParameter(unknown, param_hint="PIPELINE")
        return self.pipelines[name]

    def flow(self, pipeline: type[Pipeline]) -> Flow:
        """A pipeline with what a look at its receives needs."""
        return looked_at(pipeline, self.lake, self.control)


def load(module: str | None = None) -> "Built":
    """Load the deployment.

    A file `.env` in the working directory sets variables that are not set, as it does for Dagster.

    Args:
        module: Its module; by default what the command line names, or `workspace.yaml`.

    Raises:
        SetUpError: There is none here.
    """
    from dagster.components.definitions import LazyDefinitions

    from pipeline_platform.orchestration.deployment import BUILT

    dotenv.load_dotenv(Path(".env"))
    module = module or chosen() or _of_workspace()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of an import within
        raise SetUpError(f"there is no module {module} here, in {Path.cwd()}: correct workspace.yaml, or -m") from None
    for defined in vars(loaded).values():
        if isinstance(defined, LazyDefinitions):  # as in a project of `dg`
            defined()
    if not BUILT:
        raise SetUpError(f"{module} puts no pipelines together: have it call platform_definitions")
    return BUILT[-1]


@contextmanager
def opened(module: str | None = None) -> Iterator[Deployment]:
    """Load the deployment and set up what the command line looks at; no Spark.

    Args:
        module: As of `load`.

    Raises:
        SetUpError: There is none here; or a variable that a resource is configured by is not set, or a value is wrong.
    """
    import dagster as dg

    module = module or chosen() or _of_workspace()
    built = load(module)
    pipelines: dict[str, type[Pipeline]] = {pipeline.name: pipeline for pipeline in built.pipelines}
    sources = {producer.source for pipeline in built.pipelines for producer in pipeline.producers_of().values()}
    sources |= {pipeline.dead_letters for pipeline in built.pipelines if pipeline.dead_letters}
    with ExitStack() as set_up:
        try:
            needed = {key: built.resources[key] for key in ("lake", "control", *sources)}
            resources = set_up.enter_context(dg.build_resources(needed))
            for key in sources:
                getattr(resources, key).open(resources.control)
        except dg.DagsterInvalidConfigError as error:
            reasons = "; ".join(map(_refusal, error.errors))
            raise SetUpError(f"the resources of {module} cannot be set up: {reasons}") from None
        except dg.DagsterResourceFunctionError as error:
            key, cause = str(error).rpartition(" ")[2], error.user_exception
            raise SetUpError(f"the resource {key} of {module} cannot be set up: {reason_of(cause)}") from None
        opened_sources = {key: getattr(resources, key) for key in sources}
        yield Deployment(pipelines, resources.control, resources.lake, opened_sources)


def _refusal(error: Any) -> str:
    """The key and the option of a resource, and what Dagster says of its value."""
    key = ".".join(level for level in error.stack.levels if level != "config")
    said = error.message.partition("PostProcessingError: ")
    return f"{key}: {(said[2] or said[0]).strip().splitlines()[0]}"


def counted(number: int, noun: str) -> str:
    """So many of something: `1 run`, `2 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def choose(module: str | None) -> None:
    """Work on this module from now on; without one on that of `workspace.yaml`."""
    _CHOSEN.clear()
    if module is not None:
        _CHOSEN["module"] = module


def chosen() -> str | None:
    """The module that was chosen; None for that of `workspace.yaml`."""
    return _CHOSEN.get("module")


def _of_workspace() -> str:
    workspace = Path("workspace.yaml")
    if not workspace.is_file():
        raise SetUpError(f"there is no workspace.yaml in {Path.cwd()}: go where it lies, or name a module with -m")
    try:
        entries = [entry.get("python_module") for entry in yaml.safe_load(workspace.read_text()).get("load_from", [])]
        modules = [entry if isinstance(entry, str) else entry["module_name"] for entry in entries if entry]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        where = f"line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else "its load_from"
        raise SetUpError(f"workspace.yaml cannot be read, at {where}: mend it, or name a module with -m") from None
    if len(modules) != 1:
        raise SetUpError(f"workspace.yaml names {len(modules)} modules ({', '.join(modules)}): choose one with -m")
    return str(modules[0])
