"""The command line, `pipeline-platform`. Each group of commands is in its own file, and registered here."""

import atexit
import gc
import sys
from pathlib import Path
from typing import Annotated

import dotenv
import typer

from pipeline_platform.cli import failure_commands as failures
from pipeline_platform.cli import limit_commands as limits
from pipeline_platform.cli import loading
from pipeline_platform.cli import spark_commands as spark
from pipeline_platform.cli import table_queue_commands as table_queue
from pipeline_platform.cli.dashboard.command import dashboard
from pipeline_platform.cli.erase_command import erase
from pipeline_platform.cli.history_command import history
from pipeline_platform.cli.new_command import new
from pipeline_platform.cli.pull_command import pull
from pipeline_platform.cli.push_command import push
from pipeline_platform.cli.receives_command import receives
from pipeline_platform.cli.repair_command import repair
from pipeline_platform.cli.replay_command import replay
from pipeline_platform.cli.show_command import show
from pipeline_platform.cli.status_command import status
from pipeline_platform.cli.terminal import say
from pipeline_platform.cli.trace_command import trace
from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.ledger import ReceiveError
from pipeline_platform.lake.storage import AWAY_S
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.run.outages import store_away
from pipeline_platform.source.contract import SourceError

app = typer.Typer(
    pretty_exceptions_enable=False,
    help="Inspect the pipelines of a deployment, change their limits, retry failures, and run a warm Spark server.",
    no_args_is_help=True,
)
app.add_typer(spark.app, name="spark")
app.add_typer(table_queue.app, name="table-queue")
app.add_typer(failures.app, name="failures")
for command in (
    status,
    dashboard,
    receives,
    show,
    trace,
    limits.pause,
    limits.resume,
    limits.drain,
    limits.limit,
    limits.scale,
    history,
    pull,
    replay,
    push,
    new,
    repair,
    erase,
):
    app.command()(command)


@app.callback()
def options(
    module: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--module",
            help="Module of the deployment, or name of its location in workspace.yaml. Default: the only location "
            "there, or the dg project in the working directory.",
        ),
    ] = None,
) -> None:
    """Inspect the pipelines of a deployment, change their limits, retry failures, and run a warm Spark server."""
    dotenv.load_dotenv(Path(".env"))  # sets unset variables, as Dagster does
    loading.choose(module)


def main() -> None:
    """Run a command. Report errors of the deployment in one line."""
    for argument in sys.argv[1:]:
        if not argument.isascii() and any("\ud800" <= character <= "\udfff" for character in argument):
            say(f"{argument!r}: an argument must be valid UTF-8. Set the terminal's encoding to UTF-8", err=True)
            sys.exit(2)
    gc.set_threshold(100_000)  # garbage collection during Dagster's import takes an eighth of `status`
    atexit.register(gc.freeze)  # otherwise Python collects Dagster's objects three times at exit: a fifth of `status`
    try:
        app()
    except (loading.SetUpError, ControlStoreError, PipelineError, ReceiveError, SourceError) as error:
        say(str(error), err=True)
        sys.exit(1)
    except Exception as error:
        if (said := store_away(error)) is None:
            raise
        say(f"The lake did not answer for about {AWAY_S} s ({said}). Check that the store is running.", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
