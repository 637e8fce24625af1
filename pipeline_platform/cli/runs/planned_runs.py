"""Runs that a command launches: printed by a dry run, launched on the instance in DAGSTER_HOME, and followed."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.output import Output, print_json
from pipeline_platform.cli.progress import progress
from pipeline_platform.cli.runs.run_progress import follow
from pipeline_platform.cli.terminal import say
from pipeline_platform.control.quota import Quota
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline

if TYPE_CHECKING:
    import dagster as dg

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be launched, and launch nothing.")]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait until the runs end, and exit with 1 if a run failed.")
]
IgnorePause = Annotated[bool, typer.Option("--ignore-pause", help="Launch although the pipeline is paused.")]


class PlannedRun(NamedTuple):
    """A run to launch.

    Attributes:
        windows: Contiguous windows of the run.
        messages: Messages that the run is expected to handle.
        request: Run config and tags.
    """

    windows: Sequence[str]
    messages: int
    request: dg.RunRequest


class Launched(NamedTuple):
    """A launched run, its contiguous windows, and the number of messages that it is expected to handle."""

    run_id: str
    windows: Sequence[str]
    messages: int


class RunOutput(Output):
    """A run."""

    run_id: str | None = Field(description="Id of the run in Dagster. Null in a dry run.")
    windows: list[str] = Field(description="Windows of the run.")
    messages: int = Field(description="Messages that the run is expected to handle.")
    status: str | None = Field(
        description="Status of the run in Dagster at its end, if the command waited for it. Otherwise null."
    )


class LaunchOutput(Output):
    """Output of commands that launch runs."""

    job: str = Field(description="Name of the job.")
    runs: list[RunOutput] = Field(description="Launched runs; in a dry run, the runs that would be launched.")


def launch_all(
    job: str, runs: Iterable[PlannedRun], module: str | None = None, log: Callable[[str], object] = lambda _: None
) -> Iterator[Launched]:
    """Launch runs of one job, and yield each run once it is launched; `log` is called before the deployment is loaded.

    Raises:
        SetUpError: DAGSTER_HOME is not set, or Dagster does not launch a run.
    """
    if not os.environ.get("DAGSTER_HOME"):
        raise loading.SetUpError("DAGSTER_HOME is not set. Set it to the folder of the Dagster instance.")
    if not (planned := list(runs)):
        return
    log(f"Launching {job}: Dagster loads the code location {loading.location_of(module).name}.")
    with launching(job, module) as launch_one:
        for run in planned:
            partition = {"dagster/partition": run.request.partition_key} if run.request.partition_key else {}
            run_id = launch_one(run.request.run_config, {**run.request.tags, **partition})
            yield Launched(run_id, run.windows, run.messages)


class Launch(NamedTuple):
    """Launch of runs by a command.

    Attributes:
        pipeline: Pipeline of the runs.
        job: Name of their job.
        dry_run: Whether to launch nothing.
        wait: Whether to wait for the runs, and print their progress.
        as_json: Whether to print the result as JSON, and lines to standard error.
    """

    pipeline: type[Pipeline]
    job: str
    dry_run: bool
    wait: bool
    as_json: bool

    def say(self, text: str) -> None:
        """Print a line about the launch."""
        say(text, err=self.as_json)

    def carry_out(
        self, runs: Sequence[PlannedRun], describe: Callable[[PlannedRun | Launched], str], noun: str
    ) -> list[RunOutput]:
        """Launch runs and print a line for each; in a dry run, only print them. `report` must be called afterwards.

        Args:
            runs: Runs to launch, at least one.
            describe: Returns what a run does, such as `retries 2 failures of 2026-11-01T0900`.
            noun: Noun for the messages of the total.

        Raises:
            SetUpError: DAGSTER_HOME is not set, or Dagster does not launch a run.
        """
        if self.dry_run:
            for run in runs:
                self.say(f"would launch {self.job}: {describe(run)}")
            self.say(f"Dry run: launched none of {counted(len(runs), 'run')}.")
            return [_output(run, None, None) for run in runs]
        launched = list[Launched]()
        with progress(len(runs), lines=False) as show:
            show(0, f"Launching {counted(len(runs), 'run')}")
            for started in launch_all(self.job, runs, log=lambda text: say(text, err=True)):
                launched.append(started)
                self.say(f"run {started.run_id} {describe(started)}")
                show(len(launched), f"Launched {len(launched):,} of {counted(len(runs), 'run')}")
        total = counted(sum(run.messages for run in launched), noun)
        self.say(f"{total} in {counted(len(launched), 'run')}.")
        ended = follow(self.pipeline, [run.run_id for run in launched], err=self.as_json) if self.wait else {}
        return [_output(run, run.run_id, ended.get(run.run_id)) for run in launched]

    def report(self, runs: Sequence[RunOutput]) -> None:
        """Print runs as JSON if requested, at the end of the command.

        Raises:
            typer.Exit: A run failed that the command waited for; its code is 1.
        """
        if self.as_json:
            print_json(LaunchOutput(job=self.job, runs=list(runs)))
        if any(run.status not in {None, "success"} for run in runs):
            raise typer.Exit(1)


def _output(run: PlannedRun | Launched, run_id: str | None, status: str | None) -> RunOutput:
    return RunOutput(run_id=run_id, windows=list(run.windows), messages=run.messages, status=status)


def refuse_paused(control: ControlStore, producer: BoundProducer, *, ignore_pause: bool, pulls: bool = False) -> None:
    """Raise a `SetUpError` if a run of a producer or of the whole pipeline would take no messages due to a pause.

    The pause of a breaker applies only to a run that pulls from a source.
    """
    key = producer.key
    reason = Quota(producer, control).paused if pulls else control.paused(key)
    if reason is None:
        return
    if control.draining(key) is not None:
        raise loading.SetUpError(f"{key} is draining: {reason}. Wait until `pipeline-platform drain` has ended.")
    if not ignore_pause:
        raise loading.SetUpError(f"{key} is paused: {reason}. Resume the pipeline, or add --ignore-pause.")


def windows_text(windows: Sequence[str]) -> str:
    """Return contiguous windows as text: the only window, or the first and the last."""
    return " to ".join(dict.fromkeys((windows[0], windows[-1])))


@contextmanager
def launching(job: str, module: str | None) -> Iterator[Callable[[Mapping[str, Any], Mapping[str, str]], str]]:
    """Load the deployment and yield a function that launches a run of a job with a config and tags, and returns its id.

    The location is loaded under the name that it has in the daemon, which finds a run's code by that name.
    Dagster's own command launches a single run, so this calls the private functions of that command (Dagster 1.13).

    Raises:
        loading.SetUpError: Dagster refused to launch a run.
    """
    import click
    import dagster as dg
    from dagster._cli.job import _create_run
    from dagster._cli.workspace import cli_target
    from dagster_shared.cli import WorkspaceOpts

    of = loading.location_of(module)
    opened = cli_target.get_workspace_from_cli_opts
    try:
        with (
            dg.DagsterInstance.get() as instance,
            _workspace(of) as file,
            opened(instance, dg.__version__, WorkspaceOpts(workspace=(file,)), log_level="WARNING") as workspace,
        ):
            location = cli_target.get_code_location_from_workspace(workspace, of.name)
            of_location = cli_target.get_remote_repository_from_code_location(location, None)
            remote_job = cli_target.get_remote_job_from_remote_repo(of_location, job)

            def launch(config: Mapping[str, Any], tags: Mapping[str, str]) -> str:
                run = _create_run(
                    instance,
                    location,
                    of_location,
                    remote_job,
                    config,
                    tags,
                    op_selection=None,
                    run_id=str(uuid.uuid4()),
                )
                return instance.submit_run(run.run_id, workspace).run_id

            yield launch
    except (click.ClickException, dg.DagsterError) as error:
        raise loading.SetUpError(f"Dagster did not launch {job}: {str(error).strip().splitlines()[-1]}") from None


@contextmanager
def _workspace(of: loading.Location) -> Iterator[str]:
    """Yield a workspace file with the location: the deployment's own, or a temporary file."""
    if of.listed:
        yield "workspace.yaml"
        return
    entry = {"module_name": of.module, "working_directory": os.getcwd(), "location_name": of.name}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "workspace.yaml")
        file.write_text(json.dumps({"load_from": [{"python_module": entry}]}))  # JSON is YAML
        yield str(file)
