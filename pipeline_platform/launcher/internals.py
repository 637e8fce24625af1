"""Uses of Dagster's private API by the launcher, as of Dagster 1.13.27.

If a name is missing in another version, the import of this module fails, and `run_launcher` launches as Dagster does.
"""

import os
import sys
from dataclasses import dataclass
from typing import Self

from dagster import DagsterInstance, serialize_value
from dagster._cli.api import execute_run_command
from dagster._core.instance import InstanceRef
from dagster._core.launcher import CheckRunHealthResult, LaunchRunContext, WorkerStatus
from dagster._core.origin import RepositoryPythonOrigin
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin
from dagster._core.secrets.env_file import get_env_var_dict
from dagster._grpc.types import ExecuteRunArgs
from dagster._serdes import deserialize_value
from dagster._utils.hosted_user_process import recon_repository_from_origin
from dagster._utils.interrupts import capture_interrupts

__all__ = ["CheckRunHealthResult", "LaunchRunContext", "LocalRun", "WorkerStatus", "capture_interrupts", "execute"]


@dataclass(frozen=True)
class SerialisedLocation:
    """A code location to load, serialised. `instance` may define environment variables for it."""

    name: str
    origin: str
    instance: str

    def load(self) -> None:
        """Import the modules of the location."""
        with DagsterInstance.from_ref(deserialize_value(self.instance, InstanceRef)):  # imports its storage
            recon_repository_from_origin(deserialize_value(self.origin, RepositoryPythonOrigin)).get_definition()

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a run: `.env` in the working directory, and the instance's variables."""
        loader = deserialize_value(self.instance, InstanceRef).secrets_loader
        return {**get_env_var_dict(os.getcwd()), **(loader.get_secrets_for_environment(self.name) if loader else {})}


@dataclass(frozen=True)
class LocalRun:
    """A run of a location that Dagster loads on this machine; `arguments` is the argument of `execute`."""

    location: SerialisedLocation
    arguments: str

    @classmethod
    def of(cls, context: LaunchRunContext, instance: DagsterInstance) -> Self | None:
        """Return the run to launch; None if its location is served by another server, or uses another Python."""
        run = context.dagster_run
        if context.workspace is None or run.remote_job_origin is None or run.job_code_origin is None:
            return None
        name, repository = run.remote_job_origin.location_name, run.job_code_origin.repository_origin
        origin = context.workspace.get_code_location(name).origin
        if not isinstance(origin, ManagedGrpcPythonEnvCodeLocationOrigin) or (
            repository.executable_path != sys.executable
        ):
            return None
        location = SerialisedLocation(name, serialize_value(repository), serialize_value(instance.get_ref()))
        arguments = ExecuteRunArgs(run.job_code_origin, run.run_id, instance.get_ref())
        return cls(location, serialize_value(arguments))


def execute(arguments: str) -> None:
    """Execute a run in this process, like the command `dagster api execute_run`."""
    execute_run_command.main([arguments], standalone_mode=False)
