"""Pipelines as partitioned assets: the graph, and pulls on a real instance, Spark and queue."""

import re

import dagster as dg
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration.graph import pipeline_assets
from pipeline_platform.orchestration.jobs import RunTags
from tests.fixtures.dagster import WINDOW, figures, rows_of
from tests.fixtures.pipelines_under_test import Lettered, Told

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


# What the asset graph shows


def test_the_asset_graph_reads_like_the_pipeline():
    assets = pipeline_assets(Told)
    specs = {spec.key.path[-1]: spec for spec in assets.specs}

    assert {key.to_user_string() for key in assets.keys} == {
        "told/messages",
        "told/lines",
        "told/letters",
        "told/failed",
    }
    messages = dg.AssetKey(["told", "messages"])
    upstream = {name: {dep.asset_key for dep in spec.deps} for name, spec in specs.items()}
    assert upstream == {"messages": set(), "lines": {messages}, "letters": {messages}, "failed": {messages}}
    for spec in specs.values():
        assert spec.kinds == {"spark", "deltalake"}
        assert list(spec.owners) == ["team:tests"]
        assert spec.group_name == "told"
        assert spec.partitions_def is not None
    assert "Lines of text" in (specs["messages"].description or "")
    assert "Columns: `Line`" in (specs["lines"].description or "")
    assert "batches of up to 3" in (specs["letters"].description or "")
    assert "retry those that are open" in (specs["failed"].description or "")
    for table in ("messages", "lines", "letters"):
        assert "Materialising it pulls from `queue`" in (specs[table].description or "")


def test_the_catalog_shows_columns_with_descriptions_names_and_the_class():
    asset = pipeline_assets(Told)
    specs = {spec.key.path[-1]: spec.metadata for spec in asset.specs}
    assert specs["lines"]["dagster/table_name"] == "told.lines"
    columns = {column.name: column for column in specs["lines"]["dagster/column_schema"].columns}
    assert (columns["text"].type, columns["text"].description) == ("string", "What it says.")
    for table in ("messages", "failed", "lines", "letters"):
        shown = specs[table]["dagster/column_schema"].columns
        assert [column.name for column in shown if not column.description] == []
    (reference,) = specs["failed"]["dagster/code_references"].code_references
    assert reference.file_path.endswith("pipelines_under_test.py")


def test_its_ops_are_the_way_of_a_message():
    names = [node.name for node in pipeline_assets(Told).node_def.nodes_in_topological_order]  # type: ignore[attr-defined]

    assert names == ["receive_messages", "handle_messages", "handle_batches", "handle_failed", "commit", "acknowledge"]


# Pulling


def test_a_pull_fills_every_table_tells_all_of_it_and_empties_the_queue(location):
    location.enqueue("one", "other", "fail", "letter a", "letter a", "letter b", "letter x")

    run = location.run("told_pull")

    assert run.status == SUCCESS
    assert location.texts() == ["one", "other"]
    assert location.texts("letters") == ["letter a", "letter a", "letter b"]
    assert location.open_failures() == {WINDOW: 2}
    assert location.waiting() == 0
    assert location.flow().ledger.unfinished() == []
    told = {}
    for table in ("messages", "lines", "letters", "failed"):
        (event,) = location.materialisations(run, table)
        assert event.partition == WINDOW
        told[table] = figures(event)
    assert told["messages"]["received"] == 7
    counts = {"received": 7, "handled": 5, "failed": 2, "acknowledged": 7, "unacknowledged": 0, "batches": 3}
    assert {name: told["messages"][name] for name in counts} == counts
    assert told["messages"]["messages per second"] > 0
    assert {"seconds: receive", "seconds: handle", "seconds: batch-letters"} <= set(told["messages"])
    assert [next(iter(told[table])) for table in ("lines", "failed")] == ["rows", "open"], "what its reader wants"
    for table, rows in (("messages", 7), ("lines", 2), ("letters", 3), ("failed", 2)):
        assert told[table]["rows"] == told[table]["dagster/partition_row_count"] == rows
        assert told[table]["dagster/uri"] == location.flow().tables[table].uri
    assert told["lines"]["batch keys"] == {"o": 2}
    assert told["letters"]["batch keys"] == {"a": 2, "b": 1}
    assert told["messages"]["batch keys"] == {"o": 2, "a": 2, "b": 1}
    assert "batch keys" not in told["failed"], "they are of handled messages"
    for event in (location.materialisations(run, table)[0] for table in ("messages", "failed")):
        assert sorted((failure["stage"], failure["reason"]) for failure in rows_of(event.metadata["failures"])) == [
            ("handle_batch", "not this letter"),
            ("handle_message", "asked to fail"),
        ]
    checks = location.checks(run)
    assert checks["acknowledged"].passed
    assert not checks["open_failures"].passed
    assert checks["open_failures"].severity == dg.AssetCheckSeverity.WARN
    assert "2 open failures" in checks["open_failures"].description


def test_an_empty_queue_still_yields_every_output_and_a_pull_without_room_takes_nothing(location):
    run = location.run("told_pull")

    assert run.status == SUCCESS
    for table in ("messages", "lines", "letters", "failed"):
        (event,) = location.materialisations(run, table)
        assert figures(event)["rows" if table != "messages" else "received"] == 0
    assert all(check.passed for check in location.checks(run).values())

    location.enqueue("one")
    location.control.claim("told", "another", "run", wanted=200, capacity=200, lease_s=60)
    full = location.run("told_pull")

    assert full.status == SUCCESS
    assert full.tags[RunTags.of(Told).demand] == "0"
    assert location.waiting() == 1
    assert "capacity for 0 of 100 messages: other runs use" in location.log(full)


@pytest.mark.parametrize("pipeline", ["bare", "fast"])
def test_pipelines_without_batchers_and_by_columns_run_alike(location, pipeline):
    location.enqueue("one", "two")

    run = location.run(f"{pipeline}_pull")

    assert run.status == SUCCESS
    assert location.waiting() == 0
    assert location.rows("outcomes", pipeline)["outcome"].to_list() == ["handled", "handled"]
    if pipeline == "fast":
        assert sorted(location.rows("lines", pipeline)["text"]) == ["one", "two"]


def test_the_log_of_a_run_tells_what_callbacks_printed_and_logged(location):
    location.enqueue("a line", "letter x", "fail quietly", "fail kill")

    run = location.run("talkative_pull")

    assert run.is_success
    log = location.log(run)
    lines = log.replace("\\n", "\n").splitlines()
    for line in (
        "handling a line",
        r"WARNING message '\d+': logged a line",
        "batching 1",
        "splitting at 0",
        "failed 1",
        "handling fail kill",
    ):
        assert any(re.match(rf"\| {line}", text) for text in lines), line
    assert "Output of callbacks of task 0:" in log
    assert "Output of the splitter of 'letters':" in log


def test_a_dead_message_is_sent_on_once_its_queue_is_there(location):
    location.enqueue("fail", "one")

    away = location.run("lettered_pull")

    assert away.status == SUCCESS
    told = location.checks(away)["acknowledged"]
    assert not told.passed
    assert "1 dead letter is not sent." in told.description
    assert (location.waiting(), location.open_failures(pipeline=Lettered)) == (0, {WINDOW: 1})
    (event,) = location.materialisations(away, "failed", "lettered")
    assert {name: figures(event)[name] for name in ("open", "dead", "failed")} == {"open": 1, "dead": 1, "failed": 1}
    assert location.checks(away)["open_failures"].metadata["dead"].value == 1

    url = f"sqlite:///{location.root}/letters.sqlite"
    letters = TableQueue(name="letters", url=url, metadata_column="said")
    letters.create()
    again = location.run("lettered_pull")

    assert location.checks(again)["acknowledged"].passed
    ((row,),) = [batch.to_pylist() for share in letters.plan(9, 1, "r") for batch in letters.read(share, "r")]
    assert row["data"] == b"fail"
    assert '"pipeline": "lettered"' in row["metadata"]
    assert location.flow(Lettered).ledger.unfinished() == []
