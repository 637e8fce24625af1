"""Launching several runs of a job on the instance in DAGSTER_HOME, with the deployment loaded once.

Dagster's own command launches a single run. This module calls the private functions of that command (Dagster 1.13). If
a release has no such function, it runs the command once per run.
"""

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline_platform.cli.loading import Location, SetUpError, location_of

Launch = Callable[[Mapping[str, Any], Mapping[str, str]], str]
"""Function that launches a run with a configuration and tags, and returns its id."""


@contextmanager
def launching(job: str, module: str | None) -> Iterator[Launch]:
    """Load the deployment and yield a function that launches runs of a job.

    The location is loaded under the name that it has in the daemon, which finds a run's code by that name.

    Raises:
        SetUpError: Dagster refused to launch a run.
    """
    of = location_of(module)
    try:
        import click
        import dagster as dg
        from dagster._cli.job import _create_run
        from dagster._cli.workspace import cli_target
        from dagster_shared.cli import WorkspaceOpts
    except ImportError:
        with _workspace(of) as file:
            yield lambda config, tags: _by_command(job, config, tags, file, of.name)
        return
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
                about = {"code_location": location, "remote_repo": of_location, "remote_job": remote_job}
                given = {"run_config": config, "tags": tags, "op_selection": None, "run_id": str(uuid.uuid4())}
                run = _create_run(instance=instance, **about, **given)
                return instance.submit_run(run.run_id, workspace).run_id

            yield launch
    except (click.ClickException, dg.DagsterError) as error:
        raise SetUpError(f"Dagster did not launch {job}: {str(error).strip().splitlines()[-1]}") from None


@contextmanager
def _workspace(of: Location) -> Iterator[str]:
    """Yield a workspace file with the location: the deployment's own, or a temporary file."""
    if of.listed:
        yield "workspace.yaml"
        return
    entry = {"module_name": of.module, "working_directory": os.getcwd(), "location_name": of.name}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "workspace.yaml")
        file.write_text(json.dumps({"load_from": [{"python_module": entry}]}))  # JSON is YAML
        yield str(file)


def _by_command(job: str, config: Mapping[str, Any], tags: Mapping[str, str], file: str, location: str) -> str:
    run_id = str(uuid.uuid4())
    where = ["--workspace", file, "--location", location]
    command = [sys.executable, "-m", "dagster", "job", "launch", "--job", job, "--run-id", run_id, *where]
    given = ["--config-json", json.dumps(config), "--tags", json.dumps(tags)]
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False)  # noqa: S603 - no shell
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise SetUpError(f"Dagster did not launch {job}: {lines[-1] if lines else 'no output'}")
    return run_id
