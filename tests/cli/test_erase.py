"""`pipeline-platform erase`."""

import json

import dagster as dg
import pytest

from pipeline_platform import TableBatcher
from pipeline_platform.cli.lake import erase_command
from pipeline_platform.lake.latest.keyed_table import KeyedTable
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.orchestration.runs.quoting_runs import quoting_runs
from pipeline_platform.sinks.contract import Sink
from tests.fixtures.pipelines_under_test import Coasts
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Row, Run, visible

ANNA = "anna@example.com"


@pytest.fixture
def tables(tmp_path):
    tables = Tables(Lake(root=str(tmp_path / "lake")), Keeping)
    Run(tables, Memory(deliveries_=(("a", ANNA.encode()), ("b", b"ben"))), "r1").finish()
    return tables


@pytest.fixture
def cli(beside):
    return beside(Keeping, Coasts, memory=Memory(), queue=Memory(name="east"), beside_queue=Memory(name="west"))


def test_without_yes_it_prints_what_it_would_erase(cli, tables, control):
    answer = cli("erase", "keeping", "--where", f"text={ANNA}")
    assert answer.exit_code == 0
    assert answer.stdout.splitlines() == [
        "keeping/messages: would erase 1 row",
        "keeping/outcomes: would erase 1 row; their ids stay",
        "keeping/kept: would erase 1 row",
        "1 message, 0 old files with their rows.",
        "Dry run: erased nothing. Erase with --yes; this cannot be undone.",
    ]
    assert len(visible(tables, "kept")) == 2
    assert control.acts() == []


def test_an_erasure_is_in_the_history_without_what_was_erased(cli, tables, control):
    answer = cli("erase", "keeping", "--where", f"text={ANNA}", "--reason", "request 7", "--yes")
    assert answer.exit_code == 0, answer.output
    assert [row["text"] for row in visible(tables, "kept")] == ["ben"]
    begun, ended = control.acts()
    assert (begun.name, begun.reason, begun.options) == ("erase", "request 7", {"where": ["text"]})
    assert (ended.name, ended.options) == (
        "erase ended",
        {"messages": 1, "rows": {"messages": 1, "outcomes": 1, "kept": 1}, "old_files": 2},
    )
    assert ANNA not in cli("history", "--json").stdout
    assert ANNA not in cli("history").stdout


def test_an_erasure_that_is_not_complete_exits_with_1(cli, tables, control):
    Run(tables, Memory(deliveries_=(("c", b"late"),)), "r2").work()
    answer = cli("erase", "keeping", "--message-id", "a", "--timeout", "0", "--yes")
    assert answer.exit_code == 1
    assert "Unfinished: receive r2, whose messages are not erased yet" in answer.stdout
    assert control.acts()[-1].name == "erase incomplete"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["keeping", "--where", "txt=a"], "no table of a batcher has all of the columns txt"),
        (["coasts", "--message-id", "1"], "erase.source: must be set"),
        (["unknown", "--message-id", "1"], "pipeline 'unknown' does not exist"),
    ],
)
def test_a_wrong_option_is_refused(cli, options, said):
    refused = cli("erase", *options, "--yes")
    assert refused.exit_code == 2
    assert said in refused.stderr


def test_runs_whose_events_quote_a_message_are_found():
    asset = dg.AssetKey(["keeping", "messages"])

    def reported(text: str, window: str) -> str:
        @dg.op
        def report(context: dg.OpExecutionContext) -> None:
            context.log_event(dg.AssetMaterialization(asset, partition=window, metadata={"reason": text}))

        @dg.job
        def job() -> None:
            report()

        return job.execute_in_process(instance=instance).run_id

    with dg.DagsterInstance.ephemeral() as instance:
        mine = reported(f"refused: {ANNA}!", WINDOW)
        reported("refused: joanna@example.community", WINDOW)
        reported(ANNA, "2026-01-01T0100")
        assert quoting_runs(instance, Keeping, [WINDOW], [ANNA]) == [mine]
        assert quoting_runs(instance, Keeping, [], [ANNA]) == []


def test_the_runs_to_delete_are_printed(cli, tables, monkeypatch):
    monkeypatch.setattr("pipeline_platform.orchestration.runs.quoting_runs.quoting_runs", lambda *_: ["4711"])
    monkeypatch.setattr(erase_command, "known", lambda found: found)
    answer = cli("erase", "keeping", "--message-id", "a", "--yes")
    assert "  dagster run delete 4711" in answer.stdout.splitlines()
    assert json.loads(cli("erase", "keeping", "--message-id", "b", "--yes", "--json").stdout)["runs"] == ["4711"]


def test_trace_shows_that_a_message_was_erased(cli, tables):
    cli("erase", "keeping", "--message-id", "a", "--yes")
    answer = cli("trace", "keeping", "a")
    assert answer.exit_code == 0, answer.output
    assert f"  attempt 1 in window {WINDOW}: erased" in answer.stdout.splitlines()
    assert "receive" not in answer.stdout


def test_a_sink_with_the_same_rows_is_named(beside, tables):
    class Copied(Keeping):
        """The same pipeline with a sink."""

        batchers = {"kept": TableBatcher(schema=Row, sink="warehouse")}

    class CannotErase(Sink):
        """A fake without `erase`."""

        def ensure(self, *_): ...
        def publish(self, _): ...
        def is_published(self, *_): ...

    call = beside(Copied, sinks={"kept": CannotErase(name="warehouse")}, memory=Memory())
    answer = call("erase", "keeping", "--message-id", "a")
    assert "Rows of kept are also in the sink warehouse." in answer.stdout.splitlines()
    answer = call("erase", "keeping", "--message-id", "a", "--yes")
    assert answer.exit_code == 0, answer.output
    assert "Rows of kept are also in the sink warehouse: delete them there." in answer.stdout.splitlines()


def test_a_table_with_the_latest_rows_is_named(cli, tables):
    KeyedTable(tables.lake, "keeping", "newest", tables["kept"].schema, ["text"], ["attempt"], "key=['text']").ensure()
    answer = cli("erase", "keeping", "--message-id", "a")
    assert "keeping/newest has the latest row of each key, perhaps of these messages" in answer.stdout
    printed = json.loads(cli("erase", "keeping", "--message-id", "a", "--json").stdout)
    assert (printed["latest"], printed["runs"]) == (["keeping/newest"], None)


def test_a_message_that_was_never_decided_is_recorded_as_erased(cli, tables):
    said = "1 message without an outcome: a redelivery is not handled."
    assert said in cli("erase", "keeping", "--message-id", "unseen").stdout.splitlines()
    assert said in cli("erase", "keeping", "--message-id", "unseen", "--yes").stdout.splitlines()
    assert said not in cli("erase", "keeping", "--message-id", "unseen", "--yes").stdout.splitlines()
    assert "erased" in cli("trace", "keeping", "unseen").stdout
