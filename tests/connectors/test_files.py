"""Rows of files as messages: formats, damaged content, versions of a file, and each row once."""

import gzip
import json
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
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
from pipeline_platform.sql.database import Database
from tests.fixtures.flow import finish, handled, received, run
from tests.fixtures.flow import rows as stored
from tests.fixtures.flow_pipelines import Place


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
def root(tmp_path):
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.fixture
def source(tmp_path, root):
    return source_at(tmp_path, root)


@pytest.fixture
def flow(filled, source):
    return replace(filled(Orders, []), source=source)


def source_at(folder, root, **options: Any) -> FileSource:
    catalog = {"catalog": f"sqlite:///{folder}/catalog.sqlite", "list_every_s": 0.0, "settle_s": 0.0}
    made = FileSource(name="files", root=str(root), **{**catalog, **options})
    made.open(ControlStore(f"sqlite:///{folder}/control.sqlite"))
    return made


def lines(*numbers: int) -> bytes:
    return b"".join(b'{"number": %d}\n' % number for number in numbers)


def deliveries(source: FileSource, demand: int = 1_000) -> list[dict[str, Any]]:
    batches = (batch for share in source.plan(demand, 2, "r") for batch in source.read(share, "r"))
    return [row for batch in batches for row in batch.to_pylist()]


def write_csv(path):
    path.write_bytes(b'\xef\xbb\xbfnumber,text\r\n1,"a, ""b""\nc"\r\n\r\n2\r\n3,\xff\r\n')


def write_parquet(path):
    pl.DataFrame({"number": [1, 2], "at": [date(2026, 1, 1), None], "raw": [b"\xff", None]}).write_parquet(path)


@pytest.mark.parametrize(
    ("name", "write", "found"),
    [
        ("a.jsonl", lambda path: path.write_bytes(b'1\r\n\n{"a": 2}\n3'), [(1, b"1"), (3, b'{"a": 2}'), (4, b"3")]),
        (
            "a.jsonl.gz",
            lambda path: path.write_bytes(gzip.compress(b"1\n") + gzip.compress(b"2\n")),
            [(1, b"1"), (2, b"2")],
        ),
        (
            "a.csv",
            write_csv,
            [
                (3, b'{"number": "1", "text": "a, \\"b\\"\\nc"}'),
                (5, b'["2"]'),
                (6, b'{"number": "3", "text": "\\ufffd"}'),
            ],
        ),
        (
            "a.parquet",
            write_parquet,
            [(1, b'{"number":1,"at":"2026-01-01","raw":"_w=="}'), (2, b'{"number":2,"at":null,"raw":null}')],
        ),
        ("empty.jsonl", lambda path: path.write_bytes(b""), []),
    ],
)
def test_each_format_yields_its_rows_with_their_lines(source, root, name, write, found):
    write(root / name)

    got = deliveries(source)

    assert [(row["sequence"], row["data"]) for row in got] == found
    assert all(row["message_id"].startswith(f"{name}@") and row["partition"] == name for row in got)
    source.finish("r", list)
    assert source.backlog().messages == 0


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl.gz", gzip.compress(lines(*range(9)) + os.urandom(10**6))[:-9], "damaged after line"),
        ("a.csv", b"number\n1\n1,2\n", "the record has 2 values, and the header 1"),
        ("a.jsonl", lines(1) + b"x" * 3_000_000 + b"\n" + lines(3), "more than 1,000,000 bytes"),
        ("a.csv", b"a,a\n1,2\n", "the header has names twice: a"),
        ("a.parquet", b"PAR1 is not enough", "damaged after line 0"),
    ],
)
def test_damaged_content_is_a_message_that_describes_it(tmp_path, root, name, content, problem):
    (root / name).write_bytes(content)
    source = source_at(tmp_path, root, max_row_bytes=10**6)

    got = deliveries(source)

    described = [json.loads(row["metadata"])["problem"] for row in got if row["metadata"]]
    assert len(described) == 1
    assert problem in described[0]
    assert max(len(row["data"]) for row in got) <= 10**6


@pytest.mark.parametrize("text", [b"x" * 2_000, "é".encode() * 400], ids=["line", "payload"])
def test_a_record_that_is_too_long_fails_alone(tmp_path, root, text):
    (root / "a.csv").write_bytes(b"n,t\n1,a\n2," + text + b"\n3,c\n")
    got = deliveries(source_at(tmp_path, root, max_row_bytes=1_000))
    problems = {row["sequence"]: json.loads(row["metadata"] or "{}").get("problem", "") for row in got}
    assert problems == {2: "", 3: "the row has more than 1,000 bytes (max_row_bytes)", 4: ""}
    assert max(len(row["data"]) for row in got) <= 1_000


def test_a_quote_without_an_end_does_not_fill_the_memory(tmp_path, root):
    (root / "a.csv").write_bytes(b'n,t\n1,a\n2,"' + b"x\n" * 2_000)
    got = deliveries(source_at(tmp_path, root, max_row_bytes=1_000), demand=10_000)
    assert (got[0]["data"], got[0]["metadata"]) == (b'{"n": "1", "t": "a"}', None)
    assert "more than 1,000 bytes" in got[1]["metadata"]
    assert max(len(row["data"]) for row in got) <= 1_000


def test_a_value_that_python_cannot_represent_fails_its_row_alone(tmp_path, root):
    late = pa.array([0, 1, 2**62, 3], pa.timestamp("us"))
    pq.write_table(pa.table({"at": late, "number": [1, 2, 3, 4]}), root / "a.parquet")
    got = deliveries(source_at(tmp_path, root))
    problems = [json.loads(row["metadata"] or "{}").get("problem", "") for row in got]
    assert [row["sequence"] for row in got] == [1, 2, 3, 4]
    assert [bool(problem) for problem in problems] == [False, False, True, False]
    assert problems[2].startswith("the row cannot be read: ")


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


def test_a_replaced_version_is_not_read_and_the_new_one_is(source, root, caplog):
    (root / "a.jsonl").write_bytes(lines(1))
    (share,) = source.plan(1, 1, "r")
    (root / "a.jsonl").write_bytes(lines(1, 2))

    assert list(source.read(share, "r")) == []
    assert "a.jsonl was removed or replaced" in caplog.text
    assert [row["sequence"] for row in deliveries(source)] == [1, 2]


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
