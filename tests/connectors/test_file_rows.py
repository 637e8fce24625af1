"""Rows of files as messages: formats, damaged content, and rows that are too long."""

import gzip
import json
import os
from datetime import date

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fixtures.files import deliveries, lines, root, source, source_at

__all__ = ["root", "source"]


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
        ("a.csv", b"x" * 3_000_000 + b"\n1\n", "after line 0: the row has more than 1,000,000 bytes"),
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
