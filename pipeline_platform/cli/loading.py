"""The deployment of the command line, found by `workspace.yaml`, `pyproject.toml` or `-m`.

It is loaded without a running Dagster.
"""

import importlib
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
import yaml

from pipeline_platform.cli.waiting import waiting
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.failure import reason_of
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.run.flow import Flow, looked_at
from pipeline_platform.sinks.contract import Sink
from pipeline_platform.source.contract import Source

if TYPE_CHECKING:
    import dagster as dg

    from pipeline_platform.orchestration.deployment import Built

_CHOSEN: dict[str, str | None] = {}
"""Value of `-m`. It belongs to the whole command line, and Typer passes it to no command."""


class SetUpError(Exception):
    """A deployment was not found, or one of its resources cannot be set up."""


class Location(NamedTuple):
    """A code location: its module, its name, and folders to import the module from.

    `listed` is True for a location in `workspace.yaml`.
    """

    module: str
    name: str
    folders: tuple[str, ...] = ()
    listed: bool = False


@dataclass(frozen=True)
class Deployment:
    """Pipelines by name, with their resources.

    Sources are by key: those of producers, and those for dead letters. `spark_ui` is the address of Spark's UI, or
    empty. `sinks` are those of one pipeline, by batcher.
    """

    pipelines: dict[str, type[Pipeline]]
    control: ControlStore
    lake: Lake
    sources: dict[str, Source]
    spark_ui: str = ""
    sinks: dict[str, Sink] = field(default_factory=dict)

    def pipeline(self, name: str) -> type[Pipeline]:
        """Return a pipeline by name; `BadParameter` if it does not exist."""
        if name not in self.pipelines:
            known = f"The pipelines are {', '.join(self.pipelines)}." if self.pipelines else "There are no pipelines."
            unknown = f"pipeline {name!r} does not exist. {known}"
            raise typer.BadParameter(unknown, param_hint="PIPELINE")
        return self.pipelines[name]

    def flow(self, pipeline: type[Pipeline]) -> Flow:
        """Return a pipeline's flow for reading its receives."""
        return looked_at(pipeline, self.lake, self.control)


def load(module: str | None = None) -> "Built":
    """Load the deployment.

    Args:
        module: See `location_of`.

    Raises:
        SetUpError: The current folder has no deployment.
        PipelineError: The deployment is invalid.
    """
    from dagster.components.definitions import LazyDefinitions

    from pipeline_platform.orchestration.deployment import BUILT

    module, _, folders, _ = location_of(module)
    for folder in map(os.path.abspath, (os.curdir, *folders)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # an import within the module
        raise SetUpError(f"module {module} does not exist in {Path.cwd()}. Correct workspace.yaml, or -m") from None
    for defined in vars(loaded).values():
        if isinstance(defined, LazyDefinitions):  # as in a project of `dg`
            try:
                defined()
            except Exception as error:
                if isinstance(error.__cause__, PipelineError):  # without Dagster's tree of components
                    raise error.__cause__ from None
                raise
    if not BUILT:
        raise SetUpError(f"{module} does not define pipelines. Call platform_definitions in it")
    return BUILT[-1]


@contextmanager
def opened(
    module: str | None = None, instance: "dg.DagsterInstance | None" = None, sinks_of: str = ""
) -> Iterator[Deployment]:
    """Load the deployment and set up its resources, without Spark.

    Args:
        module: See `load`.
        instance: The Dagster instance, if it is open already. Otherwise Dagster creates one in memory, which is slow.
        sinks_of: Pipeline whose sinks are needed.

    Raises:
        SetUpError: The current folder has no deployment, or a resource has an invalid option or an unset variable.
    """
    import dagster as dg

    from pipeline_platform.orchestration.resources.sink_resources import sink_keys

    with waiting("the code of the deployment"):
        built, named = load(module), location_of(module).module
    pipelines: dict[str, type[Pipeline]] = {pipeline.name: pipeline for pipeline in built.pipelines}
    sources = {producer.source for pipeline in built.pipelines for producer in BoundProducer.all_of(pipeline)}
    sources |= {pipeline.dead_letters for pipeline in built.pipelines if pipeline.dead_letters}
    with ExitStack() as set_up:
        try:
            sinks = {} if sinks_of not in pipelines else sink_keys(pipelines[sinks_of])
            needed = {key: built.resources[key] for key in ("lake", "control", "spark", *sources, *sinks.values())}
            resources = set_up.enter_context(dg.build_resources(needed, instance))
            for key in sources:
                getattr(resources, key).open(resources.control)
        except dg.DagsterInvalidConfigError as error:
            reasons = "; ".join(_refusal(reason, str(error)) for reason in error.errors)
            raise SetUpError(f"the resources of {named} cannot be set up: {reasons}") from None
        except dg.DagsterResourceFunctionError as error:
            key, cause = str(error).rpartition(" ")[2], error.user_exception
            raise SetUpError(f"the resource {key} of {named} cannot be set up: {reason_of(cause)}") from None
        opened_sources = {key: getattr(resources, key) for key in sources}
        opened_sinks = {batcher: getattr(resources, key) for batcher, key in sinks.items()}
        yield Deployment(pipelines, resources.control, resources.lake, opened_sources, resources.spark.ui, opened_sinks)


def _refusal(error: Any, whole: str) -> str:
    """Return the key of a resource, its option, and Dagster's message about the value."""
    levels = [level for level in error.stack.levels if level != "config"]
    if found := re.match(r"Error in config for resource (\w+)\n", whole):  # the levels are within that resource
        levels.insert(0, found[1])
    key = ".".join(levels)
    said = error.message.partition("PostProcessingError: ")
    return f"{key}: {(said[2] or said[0]).strip().splitlines()[0]}"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun: `1 run`, `2 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def choose(module: str | None) -> None:
    """Use a module, or the location with this name, from now on; None for the only location."""
    _CHOSEN["module"] = module


def location_of(module: str | None = None) -> Location:
    """Return the code location of a module, or of a name in `workspace.yaml`; without either, as of `choose`.

    Without `workspace.yaml`, the location is the project of `dg` in `pyproject.toml`, or the only file in this folder
    that calls `platform_definitions`.

    Raises:
        SetUpError: There is no location here, `workspace.yaml` is invalid, or several locations match.
    """
    module, workspace = module or _CHOSEN.get("module"), Path("workspace.yaml")
    if not workspace.is_file():
        if (project := _project()) and module in (None, project.name, project.module):
            return project
        if module:
            return Location(module, module)
        modules = _modules_here()
        if len(modules) == 1:
            return Location(modules[0], modules[0])
        there = f"{len(modules)} deployments ({', '.join(modules)})" if modules else "no deployment"
        raise SetUpError(
            f"{Path.cwd()} contains {there}: no workspace.yaml, no project of dg, and no single file that calls "
            "platform_definitions. Change to the folder of the deployment, or name its module with -m"
        )
    try:
        entries = yaml.safe_load(workspace.read_text())["load_from"]
        known = [_location(*loaded) for entry in entries for loaded in entry.items()]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        where = f"line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else "its load_from"
        raise SetUpError(f"workspace.yaml is invalid at {where}. Fix it, or name a module with -m") from None
    found = [location for location in known if location and module in (None, location.name)]
    found = found or [location for location in known if location and module == location.module]
    if len(found) == 1:
        return found[0]
    if module and not found:
        return Location(module, module)
    names = ", ".join(location.name for location in found)
    raise SetUpError(f"workspace.yaml contains {len(found)} code locations ({names}). Choose one with -m")


def _location(kind: str, entry: Any) -> Location | None:
    """Return the location of an entry in `workspace.yaml`, named as in Dagster; None for a code server."""
    if kind not in ("python_module", "python_file"):
        return None
    options = entry if isinstance(entry, dict) else {}
    loaded = str(options["module_name" if kind == "python_module" else "relative_path"] if options else entry)
    folders, module = [str(options.get("working_directory") or os.curdir)], loaded
    if kind == "python_file":
        file = Path(loaded)
        folders, module, loaded = [*folders, str(file.parent)], file.stem, file.name
    attribute = f":{options['attribute']}" if options.get("attribute") else ""
    return Location(module, options.get("location_name") or f"{loaded}{attribute}", tuple(folders), listed=True)


def _modules_here() -> list[str]:
    """Return the modules in this folder that call `platform_definitions`."""
    called = re.compile(r"^[^#\n]*\bplatform_definitions\(", re.M)
    return sorted(file.stem for file in Path().glob("*.py") if called.search(file.read_text(errors="replace")))


def _project() -> Location | None:
    """Return the location of the project of `dg` here, named as in `dg dev`; None if there is no project."""
    file = Path("pyproject.toml")
    tool = tomllib.loads(file.read_text()).get("tool", {}) if file.is_file() else {}
    if not (project := tool.get("dg", {}).get("project")):
        return None
    module = project.get("code_location_target_module") or f"{project['root_module']}.definitions"
    return Location(module, project.get("code_location_name") or Path.cwd().name)
