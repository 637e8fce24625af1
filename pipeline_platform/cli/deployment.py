"""The deployment that the command line works on: what `workspace.yaml` or `-m` names. Dagster need not run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import yaml

if TYPE_CHECKING:
    from pipeline_platform.control.store import ControlStore
    from pipeline_platform.lake.storage import Lake
    from pipeline_platform.model.pipeline import Pipeline
    from pipeline_platform.source.contract import Source


class SetUpError(Exception):
    """There is no deployment here, or a resource of it cannot be set up; the message names what is missing."""


class DagsterError(Exception):
    """Dagster's instance cannot be asked; the message says why."""


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

    def receives(self, pipeline: type[Pipeline]) -> tuple[list[str], list[str], list[str]]:
        """The ids of receives that are not decided, and of those that are and not finished; what cannot be read."""
        from pipeline_platform.lake.decision import decided
        from pipeline_platform.lake.ledger import Ledger, ReceiveError
        from pipeline_platform.lake.tables import Tables

        ledger, outcomes = Ledger(self.lake, pipeline.name), Tables(self.lake, pipeline)["outcomes"]
        receives, unreadable = [], []
        for receive_id in ledger.unfinished():
            try:
                receives += [receive] if (receive := ledger.get(receive_id)) else []
            except ReceiveError as error:
                unreadable.append(str(error))
        if not receives:
            return [], [], unreadable
        handle = outcomes.open()
        undecided: list[str] = []
        unfinished: list[str] = []
        for receive in receives:
            (unfinished if decided(outcomes, handle, receive) else undecided).append(receive.receive_id)
        return undecided, unfinished, unreadable

    def runs(self, pipeline: type[Pipeline]) -> Mapping[str, int] | None:
        """How many of a pipeline's runs Dagster has queued or under way, by status; None without `DAGSTER_HOME`.

        Those of its sensor, schedules and jobs; of assets that somebody materialises by hand from when they receive.

        Raises:
            DagsterError: The instance cannot be opened, or its storage does not answer.
        """
        if not os.environ.get("DAGSTER_HOME"):
            return None
        import dagster as dg

        from assets.tags import runs_of
        from sensors.producer import UNDER_WAY

        try:
            with dg.DagsterInstance.get() as instance:
                counts = {
                    status.value.lower().replace("_", " "): instance.get_runs_count(runs_of(pipeline, [status]))
                    for status in UNDER_WAY
                }
        except Exception as error:  # of whatever storage the instance has: the rest is to be told all the same
            said = str(error).partition("\n")[0]
            raise DagsterError(f"{type(error).__name__}: {said}") from None
        return {status: count for status, count in counts.items() if count}

    def open_failures(self, pipeline: type[Pipeline]) -> dict[str, int]:
        """The failures that wait to be driven again, by window."""
        from pipeline_platform.lake.failed import FailedMessages

        name = self.source(pipeline).name
        return FailedMessages(name=name, lake=self.lake, pipeline=pipeline.name).open_by_window()


@contextmanager
def opened() -> Iterator[Deployment]:
    """Load the deployment and set up what the command line looks at; no Spark.

    Raises:
        SetUpError: There is none here; or a variable that a resource is configured by is not set, or a value is wrong.
    """
    import dagster as dg

    from pipeline_platform.deployment import last_built

    module = _module()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.import_module(module)
    built = last_built()
    if built is None:
        raise SetUpError(f"{module} puts no pipelines together: have it call platform_definitions")
    pipelines: dict[str, type[Pipeline]] = {pipeline.name: pipeline for pipeline in built.pipelines}
    keys = {"lake", "control", *(pipeline.producer.source for pipeline in pipelines.values())}
    chosen = {key: resource for key, resource in built.resources.items() if key in keys}
    with ExitStack() as set_up:
        try:
            resources = set_up.enter_context(dg.build_resources(chosen))
        except dg.DagsterInvalidConfigError as error:
            said = str(error).partition("Stack Trace:")[0].strip()
            raise SetUpError(f"the resources of {module} cannot be set up. {said}") from None
        yield Deployment(pipelines, resources)


def _module() -> str:
    """The module that the command line names by `-m`, or the one of `workspace.yaml`."""
    context = click.get_current_context(silent=True)
    named = context.find_root().params.get("module") if context else None
    if named:
        return str(named)
    workspace = Path("workspace.yaml")
    if not workspace.is_file():
        raise SetUpError(f"there is no workspace.yaml in {Path.cwd()}: go where it lies, or name a module with -m")
    entries = [entry.get("python_module") for entry in yaml.safe_load(workspace.read_text()).get("load_from", [])]
    modules = [entry if isinstance(entry, str) else entry["module_name"] for entry in entries if entry]
    if len(modules) != 1:
        raise SetUpError(f"workspace.yaml names {len(modules)} modules ({', '.join(modules)}): choose one with -m")
    return str(modules[0])
