"""The deployment that the command line works on: what `workspace.yaml`, `pyproject.toml` or `-m` names.

Dagster need not run.
"""

import importlib
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
import yaml

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.failure import reason_of
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.run.flow import Flow, looked_at
from pipeline_platform.source.contract import Source

if TYPE_CHECKING:
    import dagster as dg

    from pipeline_platform.orchestration.deployment import Built

_CHOSEN: dict[str, str] = {}
"""What `-m` names, in this process."""


class SetUpError(Exception):
    """There is no deployment here, or a resource of it cannot be set up; the message names what is missing."""


class Location(NamedTuple):
    """A code location: the module that it loads, its name, and the folders to find the module in.

    `listed` says whether `workspace.yaml` has it.
    """

    module: str
    name: str
    folders: tuple[str, ...] = ()
    listed: bool = False


@dataclass(frozen=True)
class Deployment:
    """The pipelines that are defined, and what they share.

    Pipelines are by name. Sources are by key: those that are pulled from, and those that dead letters are sent to.
    `spark_ui` is the address of Spark's UI, or empty.
    """

    pipelines: dict[str, type[Pipeline]]
    control: ControlStore
    lake: Lake
    sources: dict[str, Source]
    spark_ui: str = ""

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

    Args:
        module: Its module, or the name of its location in `workspace.yaml`; by default what the command line names,
            or the only one of `workspace.yaml`.

    Raises:
        SetUpError: There is none here.
        PipelineError: It is refused.
    """
    from dagster.components.definitions import LazyDefinitions

    from pipeline_platform.orchestration.deployment import BUILT

    module, _, folders, _ = location_of(module or chosen())
    for folder in map(os.path.abspath, (os.curdir, *folders)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of an import within
        raise SetUpError(f"there is no module {module} here, in {Path.cwd()}: correct workspace.yaml, or -m") from None
    for defined in vars(loaded).values():
        if isinstance(defined, LazyDefinitions):  # as in a project of `dg`
            try:
                defined()
            except Exception as error:
                if isinstance(error.__cause__, PipelineError):  # Dagster says in which component, and shows its tree
                    raise error.__cause__ from None
                raise
    if not BUILT:
        raise SetUpError(f"{module} puts no pipelines together: have it call platform_definitions")
    return BUILT[-1]


@contextmanager
def opened(module: str | None = None, instance: "dg.DagsterInstance | None" = None) -> Iterator[Deployment]:
    """Load the deployment and set up what the command line looks at; no Spark.

    Args:
        module: As of `load`.
        instance: Dagster's, where it is open already: without one Dagster makes one in memory, which takes long.

    Raises:
        SetUpError: There is none here; or a variable that a resource is configured by is not set, or a value is wrong.
    """
    import dagster as dg

    built, named = load(module), location_of(module or chosen()).module
    pipelines: dict[str, type[Pipeline]] = {pipeline.name: pipeline for pipeline in built.pipelines}
    sources = {producer.source for pipeline in built.pipelines for producer in pipeline.producers_of().values()}
    sources |= {pipeline.dead_letters for pipeline in built.pipelines if pipeline.dead_letters}
    with ExitStack() as set_up:
        try:
            needed = {key: built.resources[key] for key in ("lake", "control", "spark", *sources)}
            resources = set_up.enter_context(dg.build_resources(needed, instance))
            for key in sources:
                getattr(resources, key).open(resources.control)
        except dg.DagsterInvalidConfigError as error:
            reasons = "; ".join(_refusal(one, str(error)) for one in error.errors)
            raise SetUpError(f"the resources of {named} cannot be set up: {reasons}") from None
        except dg.DagsterResourceFunctionError as error:
            key, cause = str(error).rpartition(" ")[2], error.user_exception
            raise SetUpError(f"the resource {key} of {named} cannot be set up: {reason_of(cause)}") from None
        opened_sources = {key: getattr(resources, key) for key in sources}
        yield Deployment(pipelines, resources.control, resources.lake, opened_sources, resources.spark.ui)


def _refusal(error: Any, whole: str) -> str:
    """The key and the option of a resource, and what Dagster says of its value."""
    levels = [level for level in error.stack.levels if level != "config"]
    if one := re.match(r"Error in config for resource (\w+)\n", whole):  # then the levels are within that resource
        levels.insert(0, one[1])
    key = ".".join(levels)
    said = error.message.partition("PostProcessingError: ")
    return f"{key}: {(said[2] or said[0]).strip().splitlines()[0]}"


def counted(number: int, noun: str) -> str:
    """So many of something: `1 run`, `2 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def choose(module: str | None) -> None:
    """Work on this module from now on; without one on what `location_of` finds."""
    _CHOSEN.clear()
    if module is not None:
        _CHOSEN["module"] = module


def chosen() -> str | None:
    """The module that was chosen; None for what `location_of` finds."""
    return _CHOSEN.get("module")


def location_of(module: str | None) -> Location:
    """Return the code location of a module, or of a name in `workspace.yaml`; without a name, the only location.

    Without `workspace.yaml`, the location is what `pyproject.toml` says for `dg`, or the only file in this folder that
    calls `platform_definitions`.

    Raises:
        SetUpError: There is no location here, `workspace.yaml` cannot be read, or several locations are meant.
    """
    workspace = Path("workspace.yaml")
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
        raise SetUpError(f"workspace.yaml cannot be read, at {where}: mend it, or name a module with -m") from None
    found = [one for one in known if one and module in (None, one.name)]
    found = found or [one for one in known if one and module == one.module]
    if len(found) == 1:
        return found[0]
    if module and not found:
        return Location(module, module)
    names = ", ".join(one.name for one in found)
    raise SetUpError(f"workspace.yaml names {len(found)} code locations ({names}): choose one with -m")


def _location(kind: str, entry: Any) -> Location | None:
    """What an entry of `workspace.yaml` loads, named as Dagster names it; None where that is a server of its own."""
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
    """What `dg` loads here, named as `dg dev` names it; None where there is no project of it."""
    file = Path("pyproject.toml")
    tool = tomllib.loads(file.read_text()).get("tool", {}) if file.is_file() else {}
    if not (project := tool.get("dg", {}).get("project")):
        return None
    module = project.get("code_location_target_module") or f"{project['root_module']}.definitions"
    return Location(module, project.get("code_location_name") or Path.cwd().name)
