"""Rows of a file as payloads, in batches of bounded memory. Damaged content becomes a row that describes it."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, Literal

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pydantic_core import to_json

from pipeline_platform.model.portions import BATCH_BYTES
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


def _csv(raw: _Stored, path: str, most: int) -> Iterator[list[Row]]:
    """Yield a JSON object of texts for each record, by the names in the first record."""
    text = io.TextIOWrapper(io.BufferedReader(_content(raw, path), _READ), "utf-8-sig", "replace", newline="")
    csv.field_size_limit(max(csv.field_size_limit(), most))
    records = csv.reader(text)
    names = next(records, [])
    twice = sorted({name for name in names if names.count(name) > 1})
    for record in filter(None, records):
        if len(record) == len(names) and not twice:
            yield [(records.line_num, json.dumps(dict(zip(names, record, strict=True))).encode(), "")]
        else:
            problem = f"the record has {len(record)} values, and the header {len(names)}"
            problem = f"the header has names twice: {', '.join(twice)[:500]}" if twice else problem
            yield [(records.line_num, json.dumps(record).encode(), problem)]


def _parquet(raw: _Stored, _path: str, _most: int) -> Iterator[list[Row]]:
    """Yield a JSON object for each row; bytes are base64."""
    file, number = pq.ParquetFile(pa.PythonFile(raw, "r")), 0
    if len(set(names := file.schema_arrow.names)) < len(names):
        raise ValueError("it has columns with the same name")
    for batch in file.iter_batches(_PARQUET_ROWS, use_threads=False):
        for values in batch.to_pylist(maps_as_pydicts="lossy"):
            number += 1
            yield [(number, to_json(values, bytes_mode="base64"), "")]


_READERS = {"json_lines": _json_lines, "csv": _csv, "parquet": _parquet}
