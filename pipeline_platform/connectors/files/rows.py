"""Rows of a file as payloads, in batches of bounded memory. Damaged content becomes a row that describes it."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pydantic_core import to_json

from pipeline_platform.model.portions import BATCH_BYTES, halves
from pipeline_platform.source.contract import SourceAwayError

Format = Literal["json_lines", "csv", "parquet"]

BATCH_ROWS = 10_000
_PARQUET_ROWS = 1_000
_READ = 2**20
_FORMATS: dict[str, Format] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json_lines"),
    ".csv": "csv",
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


Row = tuple[int, bytes, str]
"""Number of the line or, in a Parquet file, of the row, from 1; payload; problem of content that cannot be read as a
row, else empty. It is a plain tuple because a named tuple takes longer to create than a line to read."""


def format_of(path: str) -> Format | None:
    """Return the format of a file by its name, without the suffix of its compression; None if it is unknown."""
    known = [_FORMATS[suffix] for suffix in map(str.lower, PurePosixPath(path).suffixes) if suffix in _FORMATS]
    return known[-1] if known else None


def batches_of(
    filesystem: pafs.FileSystem, path: str, format_: Format | None, max_row_bytes: int
) -> Iterator[list[Row]]:
    """Yield the rows of a file, in batches of up to 10,000 rows, and of about 16 MiB or one row.

    Raises:
        FileNotFoundError: The file does not exist.
        SourceAwayError: The store does not answer.
    """
    raw, line, batch, size = _Stored(filesystem, path), 0, list[Row](), 0
    try:
        for rows in _READERS[format_ or "json_lines"](raw, path, max_row_bytes):
            batch += rows
            size += sum(len(data) for _, data, _ in rows)
            line = batch[-1][0] if batch else line
            if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield from (batch[first : first + BATCH_ROWS] for first in range(0, len(batch), BATCH_ROWS))
                batch, size = [], 0
    except (SourceAwayError, FileNotFoundError):  # of the store
        raise
    except Exception as error:  # of the content, by several libraries
        text = " ".join(str(error).split())
        batch.append((line + 1, b"", f"the file is damaged after line {line}: {text[:500]}"))
    finally:
        raw.close()
    if batch:
        yield batch


class _Stored(io.RawIOBase):
    """A file of a store. Errors of the store are `SourceAwayError`, so they differ from errors of the content."""

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        super().__init__()
        self._file: Any = None
        self._file = self._asked(lambda: filesystem.open_input_file(path))

    def _asked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SourceAwayError(str(error)) from None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._asked(lambda: self._file.seek(offset, whence)))

    def readinto(self, buffer: Any) -> int:
        data = self._asked(lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()


def _content(raw: _Stored, path: str) -> Any:
    codec = _CODECS.get(PurePosixPath(path).suffix.lower())
    return pa.PythonFile(raw, "r") if codec is None else pa.CompressedInputStream(pa.PythonFile(raw, "r"), codec)


def _json_lines(raw: _Stored, path: str, most: int) -> Iterator[list[Row]]:
    """Yield lines without their ends; empty lines are left out. A line over `most` bytes is truncated."""
    content, line, rest, is_long = _content(raw, path), 1, b"", False
    while chunk := content.read(_READ):
        *whole, rest = (text := rest + chunk).split(b"\n")
        if is_long or len(text) > most:
            yield [row for at, each in enumerate(whole, line) for row in _line(at, each, most, is_long and at == line)]
        else:
            whole = [each.removesuffix(b"\r") for each in whole] if b"\r" in text else whole
            yield [(at, each, "") for at, each in enumerate(whole, line) if each]
        line += len(whole)
        is_long = is_long and not whole
        if len(rest) > most:
            rest, is_long = rest[: most + 1], True
    if rest:
        yield list(_line(line, rest, most, is_long))


def _line(line: int, text: bytes, most: int, is_long: bool) -> Iterator[Row]:
    if is_long or len(text) > most:
        yield line, text[:most], f"the line has more than {most:,} bytes (max_row_bytes)"
    elif text := text.removesuffix(b"\r"):
        yield line, text, ""


class _TooLongError(Exception):
    """A record has too many characters."""


class _Lines:
    """Lines of text for `csv.reader`. It counts them, and limits the characters of a record."""

    def __init__(self, text: io.TextIOWrapper, most: int) -> None:
        self._text, self._most, self._left = text, most, most
        self.number = 0

    def begin(self) -> None:
        """Start a record."""
        self._left = self._most

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._left + 2)  # with its end
        if not line:
            raise StopIteration
        self.number += 1
        if (left := self._left - len(line.rstrip("\r\n"))) >= 0:
            self._left = left
            return line
        while line and line[-1] not in "\r\n":
            line = self._text.readline(_READ)
        raise _TooLongError(_too_long(self._most))


def _csv(raw: _Stored, path: str, most: int) -> Iterator[list[Row]]:
    """Yield a JSON object of texts for each record, by the names in the first record."""
    text = io.TextIOWrapper(io.BufferedReader(_content(raw, path), _READ), "utf-8-sig", "replace", newline="")
    csv.field_size_limit(max(csv.field_size_limit(), most))
    lines = _Lines(text, most)
    records = csv.reader(lines)
    names = next(records, [])
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    while True:
        lines.begin()
        try:
            record = next(records, None)
        except _TooLongError as error:
            yield [(lines.number, b"", str(error))]
            continue
        except csv.Error as error:
            yield [(lines.number, b"", f"the record is not valid CSV: {error}")]
            continue
        if record is None:
            return
        if not record:
            continue
        problem = ""
        if twice:
            problem = f"the header has names twice: {', '.join(twice)[:500]}"
        elif len(record) != len(names):
            problem = f"the record has {len(record)} values, and the header {len(names)}"
        data = json.dumps(record if problem else dict(zip(names, record, strict=True)))
        yield [_row(lines.number, data.encode(), problem, most)]


def _parquet(raw: _Stored, _path: str, most: int) -> Iterator[list[Row]]:
    """Yield a JSON object for each row; bytes are base64."""
    file, number = pq.ParquetFile(pa.PythonFile(raw, "r")), 1
    if len(set(names := file.schema_arrow.names)) < len(names):
        raise ValueError("it has columns with the same name")
    for batch in file.iter_batches(_PARQUET_ROWS, use_threads=False):
        for part in halves(batch, BATCH_BYTES):
            yield from _objects(part, number, most)
            number += part.num_rows


def _objects(rows: pa.RecordBatch, first: int, most: int) -> Iterator[list[Row]]:
    """Yield rows as JSON objects. A row with a value that Python cannot represent has a problem."""
    try:
        values = rows.to_pylist(maps_as_pydicts="lossy")
        yield [_row(at, to_json(value, bytes_mode="base64"), "", most) for at, value in enumerate(values, first)]
    except Exception as error:  # of the content: a time after 9999, text that is not UTF-8
        if rows.num_rows == 1:
            yield [(first, b"", f"the row cannot be read: {' '.join(str(error).split())[:500]}")]
            return
        half = rows.num_rows // 2
        yield from _objects(rows.slice(0, half), first, most)
        yield from _objects(rows.slice(half), first + half, most)


def _row(at: int, data: bytes, problem: str, most: int) -> Row:
    return (at, data, problem) if len(data) <= most else (at, data[:most], _too_long(most))


def _too_long(most: int) -> str:
    return f"the row has more than {most:,} bytes (max_row_bytes)"


_READERS = {"json_lines": _json_lines, "csv": _csv, "parquet": _parquet}
