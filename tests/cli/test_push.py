"""`pipeline-platform push`: lines of a file to a source."""

import io
import json
from collections.abc import Iterator

import pytest
from click.testing import Result

from pipeline_platform.cli import push_command as pushing
from pipeline_platform.cli.errors import line_of
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.options import Processors
from pipeline_platform.source.contract import SourceError
from tests.fixtures.pipelines_under_test import Coasts, Told
from tests.fixtures.small_lake import Memory


class Small(Told):
    """A pipeline that accepts messages of ten bytes."""

    name = "small"
    processors = Processors(max_message_bytes=10)


@pytest.fixture
def queue(tmp_path):
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite", metadata_column="metadata")
    queue.create()
    return queue


@pytest.fixture
def push(tmp_path, queue, beside):
    cli = beside(Told, Coasts, Small, queue=queue, beside_queue=Memory())

    def call(name: str, content: bytes, *more: str) -> Result:
        file = tmp_path / "rows.ndjson"
        file.write_bytes(content)
        return cli("push", name, "--file", str(file), *more)

    return call


def held(queue: TableQueue) -> list[tuple[bytes, object]]:
    shares = queue.plan(1_000_000, 1, "look")
    rows = [row for share in shares for batch in queue.read(share, "look") for row in batch.to_pylist()]
    return [(row["data"], json.loads(row["metadata"]) if row["metadata"] else None) for row in rows]


def test_each_line_is_a_payload_as_it_stands(push, queue):
    answer = push("told", b'{"data": 1}\r\nno json\n\n \xff\nlast')
    assert answer.exit_code == 0
    assert answer.stdout.endswith("Sent 4 messages to queue.\n")
    assert [data for data, _ in held(queue)] == [b'{"data": 1}', b"no json", b" \xff", b"last"]


def test_with_the_option_a_line_has_data_and_metadata(push, queue):
    lines = [{"data": "text", "metadata": {"kind": "a"}}, {"data": {"é": 1}}, {"data": None, "metadata": None}]
    push("told", "\n".join(json.dumps(line) for line in lines).encode(), "--metadata")
    assert held(queue) == [(b"text", {"kind": "a"}), ('{"é": 1}'.encode(), None), (b"null", None)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"no json", "line 3 is not valid JSON"),
        (b"[" * 100_000, "line 3 is not valid JSON"),
        (b'{"data": NaN}', "line 3 is not valid JSON: NaN"),
        (b'{"data": {"a": [1e400]}}', "line 3 contains a number"),
        (b'{"data": 1, "metadata": {"a": -1e400}}', "line 3 contains a number"),
        (b'{"metadata": {}}', 'line 3 must be {"data": ..., "metadata": {...}}'),
        (b'{"data": 1, "headers": {}}', "line 3 must be"),
        (b'{"data": 1, "metadata": "a"}', "metadata of line 3 must be an object, got str"),
    ],
)
def test_a_line_that_cannot_be_sent_is_named_with_where_to_go_on(push, queue, line, said, monkeypatch):
    monkeypatch.setattr(pushing, "_TOGETHER", 1)
    answer = push("told", b'{"data": 1}\n{"data": 2}\n' + line, "--metadata")
    assert answer.exit_code == 2
    assert said in answer.stderr
    assert "Lines from 3 on were not sent. Fix the line, and continue with --from-line 3." in answer.stderr
    assert [data for data, _ in held(queue)] == [b"1", b"2"]


def test_lines_that_an_earlier_call_sent_are_left_out(push, queue):
    push("told", b"one\ntwo\nthree\n", "--from-line", "3")
    assert [data for data, _ in held(queue)] == [b"three"]


def test_a_line_that_no_run_would_handle_is_refused(push, queue):
    answer = push("small", b"0123456789\r\n01234567890\n")
    assert "line 2 is longer than processors.max_message_bytes (10) allows" in answer.stderr
    assert held(queue) == [], "with what was to be sent together"


class Endless(io.RawIOBase):
    """A file of endless lines that records the largest read."""

    def __init__(self) -> None:
        self.lines, self.most = 0, 0

    def readline(self, size: int | None = -1) -> bytes:
        self.lines += 1
        self.most = max(self.most, size or 0)
        return b"x" * 100 + b"\n"


def test_a_file_is_never_held_whole():
    file, sent = Endless(), []

    class Full(Memory):
        def send(self, payloads: Iterator[bytes], metadata: object = None) -> int:
            sent.append(len(list(payloads)))
            if len(sent) == 3:
                raise SourceError("the disk is full")
            return sent[-1]

    with pytest.raises(SourceError) as refused:
        pushing._push(Full(), file, 1_000, 1, lambda done, text: None, has_metadata=False)

    assert sent == [1_000] * 3
    assert (file.lines, file.most) == (3_000, 1_002)
    assert str(refused.value).startswith("lines 2,001 to 3,000 were not all accepted: the disk is full")
    assert str(refused.value).endswith("--from-line 2001")


def test_a_source_that_takes_none_says_so_and_several_producers_are_asked_which(push):
    assert "Choose one of east, west" in push("coasts", b"one").stderr
    answer = push("coasts", b"one", "--producer", "west")
    assert answer.exit_code == 1
    assert "source 'memory': Memory does not support send()" in line_of(answer.exception)
    assert push("coasts", b"one", "--producer", "east").exit_code == 0
