"""`pipeline-platform erase`: remove messages, their rows and their payloads from the lake for good."""

from functools import partial
from typing import Annotated, Self

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import dagster_instance, known, unavailable
from pipeline_platform.cli.history_command import Why, record
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.options import Json, Name
from pipeline_platform.cli.output import Output, print_json
from pipeline_platform.cli.terminal import say
from pipeline_platform.lake.erasing.erasing import Erased, Erasing, searched_columns
from pipeline_platform.lake.erasing.erasure_choice import ErasureChoice
from pipeline_platform.lake.latest.keyed_table import keyed_tables
from pipeline_platform.lake.maintenance.compaction import UnreadableFileError
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError

_WHERE = (
    "COLUMN=VALUE: messages with this value in a column of a batcher's table. If the option is repeated, a row must "
    "have all values."
)
_CONTAINING = "Messages with this text in their payload, their metadata or a column of their rows."
_TIMEOUT = "Time to wait for the end of receives in progress."


class EraseOutput(Output):
    """Output of `erase`."""

    messages: int = Field(description="Number of messages that were found.")
    undecided: int = Field(description="Number of messages without an outcome, whose redeliveries are not handled.")
    rows: dict[str, int] = Field(description="Rows by table. Those of `outcomes` keep the ids of messages.")
    sinks: dict[str, int | None] = Field(
        description="Rows in the sinks of batchers, by batcher; null if the sink cannot erase them. Empty in a dry run."
    )
    old_files: int = Field(description="Files that no commit names, with rows of the messages.")
    unfinished: list[str] = Field(description="Receives that did not end in time, whose messages are not erased.")
    left: list[str] = Field(description="Rows and files that are not erased, and errors of sinks.")
    latest: list[str] = Field(
        description="Tables `<pipeline>/<asset>` with the latest row of each key, perhaps of these messages, to start "
        "over."
    )
    runs: list[str] | None = Field(
        description="Runs in Dagster that may quote the messages, to delete. Null in a dry run, or without Dagster."
    )
    complete: bool = Field(description="Whether nothing is left to erase; false in a dry run.")
    dry_run: bool = Field(description="Whether nothing was erased.")

    @classmethod
    def of(cls, erased: Erased, latest: list[str], runs: list[str] | None = None, *, dry_run: bool) -> Self:
        """Return the output for a result or a preview."""
        return cls(
            messages=len(erased.ids),
            rows=dict(erased.rows),
            latest=latest,
            runs=runs,
            complete=erased.is_complete and not dry_run,
            dry_run=dry_run,
            **{name: getattr(erased, name) for name in ("undecided", "sinks", "old_files", "unfinished", "left")},
        )


def erase(
    pipeline: Name,
    where: Annotated[list[str] | None, typer.Option(help=_WHERE)] = None,
    containing: Annotated[str | None, typer.Option(help=_CONTAINING)] = None,
    message_id: Annotated[list[str] | None, typer.Option(help="Message with this id. Repeat it for others.")] = None,
    source: Annotated[str | None, typer.Option(help="Source of the ids, if the pipeline has several.")] = None,
    reason: Why = "",
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help=_TIMEOUT)] = 60,
    yes: Annotated[bool, typer.Option("--yes", help="Erase. By default, only print what would be erased.")] = False,
    as_json: Json = False,
) -> None:
    """Erase messages with their rows, payloads and failures, from all tables and files of a pipeline.

    This cannot be undone. Only the ids of the messages stay, in `outcomes`, so that a redelivery is not handled again.
    If the command is interrupted, call it again. It exits with 1 if something is left to erase.
    """
    with loading.opened(sinks_of=pipeline) as opened:
        of = opened.pipeline(pipeline)
        tables = Tables(opened.lake, of, opened.sinks)
        try:
            choice = ErasureChoice.of(
                searched_columns(tables),
                sorted({opened.sources[producer.source].name for producer in BoundProducer.all_of(of)}),
                where=where or (),
                containing=containing,
                message_ids=message_id or (),
                source=source,
                reason=reason,
            )
        except PipelineError as error:
            raise typer.BadParameter(str(error)) from None
        erasing = Erasing(tables, choice, partial(say, err=True))
        latest = [f"{pipeline}/{name}" for name in keyed_tables(opened.lake, pipeline)]
        try:
            if not yes:
                found = erasing.preview()
                if as_json:
                    print_json(EraseOutput.of(found, latest, dry_run=True))
                    return
                _say(found, f"{pipeline}/{{}}: would erase")
                for name in opened.sinks:
                    say(f"Rows of {name} are also in the sink {of.batchers[name].sink}.")
                _say_latest(latest)
                say("Dry run: erased nothing. Erase with --yes; this cannot be undone.")
                return
            record(opened, pipeline, "erase", reason, **choice.shown)  # before, because it may be interrupted
            erased = erasing.erase(timeout_s)
        except UnreadableFileError as error:
            raise loading.SetUpError(str(error)) from None
        record(
            opened,
            pipeline,
            "erase ended" if erased.is_complete else "erase incomplete",
            messages=len(erased.ids),
            rows=dict(erased.rows),
            old_files=erased.old_files,
        )
    if as_json:
        print_json(EraseOutput.of(erased, latest, _quoting_runs(of, erased, choice), dry_run=False))
        raise typer.Exit(0 if erased.is_complete else 1)
    _say(erased, f"{pipeline}/{{}}: erased")
    _say_runs(_quoting_runs(of, erased, choice))
    _say_latest(latest)
    for name, rows in erased.sinks.items():
        sink = f"the sink {of.batchers[name].sink}"
        if rows is None:
            say(f"Rows of {name} are also in {sink}: delete them there.")
        else:
            say(f"{pipeline}/{name}: erased {counted(rows, 'row')} in {sink}")
    for left in erased.left:
        say(f"Left: {left}")
    if not erased.is_complete:
        say("Not complete: call the command again when receives, maintenance and repairs have ended.", err=True)
        raise typer.Exit(1)


def _say(erased: Erased, row: str) -> None:
    for table, rows in erased.rows.items():
        kept = "; their ids stay" if table == "outcomes" else ""
        say(f"{row.format(table)} {counted(rows, 'row')}{kept}")
    say(f"{counted(len(erased.ids), 'message')}, {counted(erased.old_files, 'old file')} with their rows.")
    if erased.undecided:
        say(f"{counted(erased.undecided, 'message')} without an outcome: a redelivery is not handled.")
    for receive_id in erased.unfinished:
        say(f"Unfinished: receive {receive_id}, whose messages are not erased yet. See `pipeline-platform receives`.")


def _say_latest(latest: list[str]) -> None:
    for name in latest:
        say(f"{name} has the latest row of each key, perhaps of these messages: delete its folder, and materialise it.")


def _quoting_runs(pipeline: type[Pipeline], erased: Erased, choice: ErasureChoice) -> list[str] | None:
    """Return the runs in Dagster that may quote the messages; None if Dagster cannot be searched."""
    from pipeline_platform.orchestration.runs.quoting_runs import quoting_runs

    with dagster_instance() as found:
        if (instance := known(found)) is None:
            return None
        try:
            return quoting_runs(instance, pipeline, sorted(erased.windows), [*choice.texts, *erased.ids])
        except Exception as error:  # of Dagster's storage; the result of the erasure must be printed
            say(f"Dagster's storage is {unavailable(error)}", err=True)
            return None


def _say_runs(runs: list[str] | None) -> None:
    if runs is None:
        say("Dagster was not searched: set DAGSTER_HOME to list the runs whose events quote the messages.")
    elif runs:
        say(f"{counted(len(runs), 'run')} in Dagster may quote the messages. To delete them with their events:")
        say(*(f"  dagster run delete {run_id}" for run_id in runs))
