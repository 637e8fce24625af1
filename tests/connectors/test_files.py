"""Files as a source: which files are read, versions of a file, and each row once."""

import json
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.fs as pafs
import pytest
from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.connectors.files import FileSource, catalog, rows
from pipeline_platform.control import pace
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run import steps
from pipeline_platform.run.lease import fence_and_release
from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.sql.database import Database
from tests.fixtures.files import deliveries, lines, root, source, source_at
from tests.fixtures.flow import finish, handled, received, run
from tests.fixtures.flow import rows as stored
from tests.fixtures.flow_pipelines import Place

__all__ = ["root", "source"]


class Order(BaseModel):
    number: int


class Orders(Pipeline):
    name = "orders"
    producer = Producer(source="files")
    processors = Processors(max_demand=100)
    batchers = {"lake": TableBatcher(schema=Order)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put_data(message.json(Order)).put_batcher("lake")


@pytest.fixture
def flow(filled, source):
    return replace(filled(Orders, []), source=source)


def test_links_and_names_that_are_not_utf_8_are_left_out(tmp_path, root, caplog):
    (tmp_path / "secret.jsonl").write_bytes(lines(7))
    (root / "a.jsonl").write_bytes(lines(1))
    (root / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (root / "again").symlink_to(".")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff.jsonl")).write_bytes(lines(2))
    source = source_at(tmp_path, root)

    assert [row["data"] for row in deliveries(source)] == [b'{"number": 1}']
    assert "its name is not UTF-8" in caplog.text


def test_a_file_that_a_link_replaces_is_missing(tmp_path, root, source, caplog):
    (root / "a.jsonl").write_bytes(lines(1))
    shares = source.plan(10, 1, "r")
    (root / "a.jsonl").rename(tmp_path / "a.jsonl")
    (root / "a.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert [row for share in shares for batch in source.read(share, "r") for row in batch.to_pylist()] == []


def test_a_bad_row_fails_alone_and_its_id_names_the_file_and_the_line(root, source, flow):
    (root / "day" / "hour").mkdir(parents=True)
    (root / "day" / "hour" / "a.jsonl").write_bytes(lines(1) + b"no json\n" + lines(3))

    run(flow)

    assert sorted(stored(flow, "lake")["number"]) == [1, 3]
    (failed,) = stored(flow, "failed")["message_id"]
    assert failed.startswith("day/hour/a.jsonl@")
    assert failed.endswith("#2")
    assert source.backlog().messages == 0


def test_a_file_larger_than_the_demand_is_received_whole_by_a_run_alone(root, source, flow, monkeypatch):
    monkeypatch.setattr(rows, "BATCH_ROWS", 1_000)
    (root / "large.jsonl").write_bytes(lines(*range(2_500)))
    (root / "small.jsonl").write_bytes(lines(2_500))

    run(flow)
    assert len(stored(flow, "lake")) == 2_500
    run(flow)

    assert sorted(stored(flow, "lake")["number"]) == [*range(2_501)]
    rows_of_a_file = source.plan(1, 1, "none")
    assert rows_of_a_file == []


@pytest.mark.parametrize("crash", [received, handled])
def test_rows_are_stored_once_if_a_run_crashes_and_its_files_are_read_again(root, source, flow, crash):
    for name in ("a", "b"):
        (root / f"{name}.jsonl").write_bytes(lines(*range(10)))

    crashed = crash(flow)
    assert source.backlog().messages == 0, "it leases the files"
    fence_and_release(flow, crashed)
    run(flow)

    assert len(stored(flow, "lake")) == 20
    assert source.backlog().messages == 0


def test_a_drain_releases_the_files_with_unstarted_rows_and_their_other_rows_are_duplicates(root, source, flow):
    (root / "a.jsonl").write_bytes(lines(1, 2))
    receive = handled(flow)
    steps.batch_messages(flow, receive)
    steps.decide(flow, receive)
    steps.publish(flow, receive)

    (file,) = {row["ack_id"] for row in stored(flow, "messages").to_dicts()}
    source.give_back(receive.receive_id, lambda: [(receive.receive_id, [file])], list)
    steps.acknowledge(flow, receive)
    assert source.backlog().messages == 1

    run(flow)
    assert sorted(stored(flow, "lake")["number"]) == [1, 2]
    assert source.backlog().messages == 0


class Notified(Orders):
    """A pipeline whose own `acknowledge` writes each call to a file. Its runs are stopped at number 1; 0 fails."""

    name = "notified"
    processors = Processors(concurrency=1, max_demand=100)
    context = Place()

    def handle_message(self, message: Message, context: Place) -> Message:
        number = message.json()["number"]
        assert number, "is 0"
        if number == 1:
            ControlStore(f"sqlite:///{context.folder}/control.sqlite").drain("notified", "moves", timedelta(0))
        time.sleep(0.1)
        return super().handle_message(message, context)

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Place) -> None:
        called = {"successful": successful, "failed": failed}
        numbers = {how: [message.json()["number"] for message in messages] for how, messages in called.items()}
        Path(context.folder, ack_ref).write_text(json.dumps(numbers))


def test_only_decided_rows_of_a_released_file_are_passed_to_the_pipeline_s_acknowledge(
    root, source, flow, tmp_path, monkeypatch
):
    monkeypatch.setattr(pace, "_LOOK_S", 0.2)
    flow = replace(flow, producer=BoundProducer(Notified))
    (root / "a.jsonl").write_bytes(lines(*range(20)))

    def notified(receive: Receive) -> dict[str, list[int]]:
        return json.loads((tmp_path / receive.receive_id).read_text())  # type: ignore[no-any-return]

    first = handled(flow, context={"folder": str(tmp_path)})
    finish(flow, first)
    begun = 1 + stored(flow, "lake").height
    assert begun < 20
    assert notified(first) == {"successful": [*range(1, begun)], "failed": [0]}

    flow.control.resume("notified")
    assert notified(run(flow, context={"folder": str(tmp_path)})) == {"successful": [*range(begun, 20)], "failed": []}


def test_a_file_that_is_written_again_is_a_new_version(source, root):
    path = root / "a.jsonl"
    path.write_bytes(lines(1))
    first = deliveries(source)
    source.finish("r", list)
    assert deliveries(source) == []

    path.write_bytes(lines(1, 2))

    second = deliveries(source)
    assert [row["sequence"] for row in second] == [1, 2]
    assert not {row["message_id"] for row in first} & {row["message_id"] for row in second}


def test_other_files_are_left_out(tmp_path, root, caplog):
    for name in (".hidden.jsonl", "_temporary/a.jsonl", "b.jsonl", "day/c.jsonl", "day/readme.md"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(lines(1))

    assert len(deliveries(source_at(tmp_path, root))) == 2
    assert "day/readme.md" in caplog.text
    assert len(deliveries(source_at(tmp_path, root, table="some", pattern="day/*", format="json_lines"))) == 2
    assert source_at(tmp_path, root, table="later", settle_s=3_600).backlog().messages == 0


@pytest.mark.parametrize("path", ["day//a.jsonl", "/a.jsonl"])
def test_a_key_with_an_empty_part_is_left_out(source, monkeypatch, path):
    files = Mock()
    files.get_file_info.return_value = [pafs.FileInfo(path, pafs.FileType.File, size=14, mtime_ns=0)]
    monkeypatch.setitem(source.__dict__, "_files", files)

    assert source.backlog().messages == 0


def test_a_replaced_version_is_not_read_and_the_new_one_is(source, root, caplog):
    (root / "a.jsonl").write_bytes(lines(1))
    (share,) = source.plan(1, 1, "r")
    (root / "a.jsonl").write_bytes(lines(1, 2))

    assert list(source.read(share, "r")) == []
    assert "a.jsonl was removed or replaced" in caplog.text
    assert [row["sequence"] for row in deliveries(source)] == [1, 2]


def test_an_object_that_is_replaced_while_it_is_read_fails_the_read_and_its_new_version_is_read(tmp_path, s3):
    lake = Lake(root="s3://lake/replaced", storage_options=s3)
    lake.write("a.jsonl", lines(1))
    source = source_at(tmp_path, lake.root, storage_options=s3)
    (share,) = source.plan(10, 1, "r")
    reading = source.read(share, "r")
    next(reading)
    lake.write("a.jsonl", lines(2, 3))

    with pytest.raises(SourceError) as replaced:
        next(reading)
    source.abandon("r", list)

    assert not isinstance(replaced.value, SourceAwayError), "a retry would read the new version as the old one"
    assert [row["data"] for row in deliveries(source)] == lines(2, 3).splitlines()


def test_files_of_a_folder_that_is_unavailable_for_a_while_are_read_later(source, root, monkeypatch):
    (root / "a.jsonl").write_bytes(lines(1))
    (share,) = source.plan(1, 1, "r")
    root.rename(root.with_name("unmounted"))
    root.mkdir()

    assert list(source.read(share, "r")) == []
    source.finish("r", list)
    assert source.backlog().messages == 0, "it is looked for again later"

    root.rmdir()
    root.with_name("unmounted").rename(root)
    now = Database.now
    monkeypatch.setattr(Database, "now", lambda *of: now(*of) + 601 * 1_000_000)
    assert [row["sequence"] for row in deliveries(source)] == [1]


def test_a_bucket_without_objects_is_empty(tmp_path, s3):
    assert source_at(tmp_path, "s3://lake/nothing-yet", storage_options=s3).backlog().messages == 0


def test_the_first_files_of_a_new_catalog_may_have_been_delivered_before(source, root):
    (root / "a.jsonl").write_bytes(lines(1))
    (first,) = deliveries(source)
    (root / "b.jsonl").write_bytes(lines(2))
    (second,) = deliveries(source)

    assert [first["redelivered"], second["redelivered"]] == [True, False]


def empty(folder: Path, tables: Iterable[str]) -> None:
    with closing(sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)) as catalog:
        for table in tables:
            catalog.execute(f"DELETE FROM {table}")


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("lost", [["files"], ["files_listings"], ["files", "files_listings"], "the database"])
def test_files_of_a_lost_catalog_are_found_again_and_count_as_redelivered(tmp_path, root, source, lost, is_restarted):
    for number in (1, 2):
        (root / f"{number}.jsonl").write_bytes(lines(number))
    first = deliveries(source)
    source.finish("r", list)
    if lost == "the database":
        source.close()
        for file in tmp_path.glob("catalog.sqlite*"):
            file.unlink()
    else:
        empty(tmp_path, lost)

    again = deliveries(source_at(tmp_path, root) if is_restarted else source)

    found = [] if lost == ["files_listings"] else [(row["message_id"], True) for row in first]
    assert [(row["message_id"], row["redelivered"]) for row in again] == found
    (root / "3.jsonl").write_bytes(lines(3))
    assert [row["redelivered"] for row in deliveries(source)] == [False]


def test_files_count_as_redelivered_until_a_listing_follows_the_loss_of_the_catalog(tmp_path, root, source):
    for number in (1, 2):
        (root / f"{number}.jsonl").write_bytes(lines(number))
    deliveries(source)
    source.finish("r", list)
    empty(tmp_path, ["files"])
    crashed = source_at(tmp_path, root)
    crashed._catalog.add(list(crashed._found())[:1])

    assert [row["redelivered"] for row in deliveries(source_at(tmp_path, root))] == [True, True]


def test_early_acknowledgement_is_refused():
    assert not FileSource.acknowledges_by_id


def test_files_that_come_back_after_the_folder_was_empty_are_still_done(source, root):
    (root / "a.jsonl").write_bytes(lines(1))
    deliveries(source)
    source.finish("r", list)

    (root / "a.jsonl").rename(root.parent / "a.jsonl")
    assert source.backlog().messages == 0
    (root.parent / "a.jsonl").rename(root / "a.jsonl")

    assert source.backlog().messages == 0


@pytest.mark.parametrize(
    ("root", "options"),
    [
        ("s3://lake/incoming", "s3"),
        ("az://lake/incoming", "azure_lake"),
        ("abfss://lake@local.dfs.core.windows.net/in", "azure_lake"),
    ],
)
def test_files_of_an_object_store_are_read(tmp_path, root, options, request):
    options = request.getfixturevalue(options)
    lake = Lake(root=root, storage_options=options)
    lake.write("day/a.jsonl.gz", lines(1, 2))  # PyArrow compresses it, because of its name

    source = source_at(tmp_path, root, storage_options=options)

    assert [row["data"] for row in deliveries(source)] == [b'{"number": 1}', b'{"number": 2}']


def test_the_demand_chooses_files_by_the_bytes_of_rows_of_earlier_files(source, root):
    (root / "0.jsonl").write_bytes(lines(*range(1_000)))
    deliveries(source)
    source.finish("r", list)
    for number in range(1, 9):
        (root / f"{number}.jsonl").write_bytes(lines(*range(1_000)))

    assert source.backlog().messages == 8_000
    assert sum(share.messages for share in source.plan(2_500, 2, "r")) == 3_000
    assert rows.format_of("a.b/c.CSV.gz") == "csv"


def test_until_a_file_is_done_a_receive_gets_one_large_file(source, root, monkeypatch):
    monkeypatch.setattr(catalog, "_FIRST_BYTES", 5_000)
    for number in range(4):
        (root / f"{number}.jsonl").write_bytes(lines(*range(1_000)))

    (share,) = source.plan(10_000, 2, "r")
    assert len(share.at["files"]) == 1
    assert sum(map(len, source.read(share, "r"))) == 1_000
    source.finish("r", list)
    assert [len(share.at["files"]) for share in source.plan(2_000, 2, "r2")] == [1, 1]
