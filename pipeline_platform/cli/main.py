"""The command line, `pipeline-platform`. Each group of commands is in its own file, and registered here."""

import atexit
import gc
import sys
from pathlib import Path
from typing import Annotated, Any

import dotenv
import typer
from typer.core import TyperGroup

from pipeline_platform.cli import limit_commands as limits
from pipeline_platform.cli import loading
from pipeline_platform.cli.dashboard.command import dashboard
from pipeline_platform.cli.doctor.doctor_command import doctor
from pipeline_platform.cli.errors import FAILED, exiting_with
from pipeline_platform.cli.failures import failure_commands as failures
from pipeline_platform.cli.history_command import history
from pipeline_platform.cli.lake.erase_command import erase
from pipeline_platform.cli.lake.receives_command import receives
from pipeline_platform.cli.lake.repair_command import repair
from pipeline_platform.cli.lake.trace_command import trace
from pipeline_platform.cli.push_command import push
from pipeline_platform.cli.runs.pull_command import pull
from pipeline_platform.cli.runs.replay_command import replay
from pipeline_platform.cli.setup import spark_commands as spark
from pipeline_platform.cli.setup import table_queue_commands as table_queue
from pipeline_platform.cli.setup.new_command import new
from pipeline_platform.cli.show_command import show
from pipeline_platform.cli.status.status_command import status
from pipeline_platform.cli.terminal import say

_TASKS = """
**Why did a message fail?** `failures list NAME`, then `failures show NAME ID`

**Retry after a fix**: `failures retry NAME --since 1h`

**Pause, and go on**: `pause NAME`, `resume NAME`

**Stop gently**: `drain NAME`

**Where is a message?** `trace NAME ID`

**Nothing happens?** `status`, then `doctor`
"""


class _InOrder(TyperGroup):
    """The commands in the order of the panels: Typer lists groups of commands last."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        panels = [*_COMMANDS]
        return sorted(self.commands, key=lambda name: panels.index(str(getattr(self.commands[name], _PANEL))))


_PANEL = "rich_help_panel"
app = typer.Typer(
    cls=_InOrder,
    pretty_exceptions_enable=False,
    help="Run the pipelines of a deployment: look at them, retry failures, pause them, and change their limits.",
    epilog=_TASKS,
    rich_markup_mode="markdown",
    no_args_is_help=True,
)

_LOOK, _FAILURES, _CHANGE = "Look", "Failures", "Pause and limit"
_START, _DATA, _SET_UP = "Start runs and send messages", "Repair and erase", "Set up"
_COMMANDS = {
    _LOOK: (status, dashboard, doctor, trace, receives, show, history),
    _FAILURES: (),
    _CHANGE: (limits.pause, limits.resume, limits.drain, limits.limit, limits.scale),
    _START: (pull, replay, push),
    _DATA: (repair, erase),
    _SET_UP: (new,),
}
"""Commands by the panel of the help, in its order."""

for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(failures.app, name="failures", rich_help_panel=_FAILURES)
app.add_typer(spark.app, name="spark", rich_help_panel=_SET_UP)
app.add_typer(table_queue.app, name="table-queue", rich_help_panel=_SET_UP)


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
    """Run the pipelines of a deployment: look at them, retry failures, pause them, and change their limits."""
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
    with exiting_with(FAILED):
        app()


if __name__ == "__main__":
    main()
