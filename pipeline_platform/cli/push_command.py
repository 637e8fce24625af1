"""`pipeline-platform push`: send the lines of a file to a pipeline's source as messages."""

import json
import os
from collections.abc import Iterator
from typing import IO, Annotated, Any, NamedTuple

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.limit_commands import chosen_producer
from pipeline_platform.cli.options import Json, Name
from pipeline_platform.cli.output import Output, print_json
from pipeline_platform.cli.progress import Show, progress
from pipeline_platform.cli.terminal import say
from pipeline_platform.model.portions import portions
from pipeline_platform.source.contract import Source, SourceError

_TOGETHER, _BYTES = 1_000, 8 * 2**20
"""Maximum messages and bytes per call of the source: also the range of lines that an error leaves uncertain."""

_FILE = "File with one message per line; `-` for standard input. Empty lines are skipped."
_METADATA = 'Lines are JSON: {"data": ..., "metadata": {...}}. By default, a line is a payload.'
_FROM = "Number of the first line to send, to continue after an error."


class Line(NamedTuple):
    """A message of a file, and its line number, starting at 1."""

    number: int
    payload: bytes
    metadata: dict[str, Any] | None


class PushOutput(Output):
    """Output of `push`."""

    messages: int = Field(description="Number of messages sent.")
    source: str = Field(description="Name of the source.")


def push(
    pipeline: Name,
    file: Annotated[typer.FileBinaryRead, typer.Option(help=_FILE)],
    metadata: Annotated[bool, typer.Option("--metadata", help=_METADATA)] = False,
    from_line: Annotated[int, typer.Option(min=1, help=_FROM)] = 1,
    producer: Annotated[str, typer.Option(help="Producer of the source. Required if the pipeline has several.")] = "",
    as_json: Json = False,
) -> None:
    """Send messages to the source of a pipeline."""
    with chosen_producer(pipeline, producer, as_json=as_json, several="several producers") as (opened, of):
        source = opened.sources[of.source]
        most = of.pipeline.processors.max_message_bytes
        with progress(_size(file)) as show:
            sent = _push(source, file, most, from_line, show, has_metadata=metadata)
    if as_json:
        print_json(PushOutput(messages=sent, source=source.name))
    else:
        say(f"Sent {loading.counted(sent, 'message')} to {source.name}.")


def _push(source: Source, file: IO[bytes], most_bytes: int, from_line: int, show: Show, *, has_metadata: bool) -> int:
    """Send lines in portions, and return the number of messages sent. Errors name the line to continue from."""
    lines, sent = _lines(file, most_bytes, from_line, has_metadata=has_metadata), 0
    parts = portions(lines, lambda line: len(line.payload), _BYTES, _TOGETHER)
    while True:
        try:
            some = next(parts, [])
        except ValueError as error:
            unsent = f"{error}. Lines from {from_line:,} on were not sent. Fix the line, and continue with "
            raise typer.BadParameter(f"{unsent}--from-line {from_line}.", param_hint="--file") from None
        if not some:
            return sent
        try:
            notes = [line.metadata for line in some] if any(line.metadata for line in some) else None
            sent += source.send([line.payload for line in some], notes)
        except SourceError as error:
            where = f"lines {some[0].number:,} to {some[-1].number:,}"
            way_out = f"Continue with --from-line {some[0].number}"
            before = f". Sent {loading.counted(sent, 'message')} before these lines. {way_out}" if sent else ""
            raise SourceError(f"{where} were not all accepted: {error}{before}") from None
        from_line = some[-1].number + 1
        show(_position(file), f"Sent {loading.counted(sent, 'message')}, up to line {some[-1].number:,}.")


def _size(file: IO[bytes]) -> int | None:
    """Return the size of a file; None for standard input that is not a file."""
    try:
        return os.fstat(file.fileno()).st_size or None
    except OSError:
        return None


def _position(file: IO[bytes]) -> int:
    try:
        return file.tell()
    except OSError:
        return 0


def _lines(file: IO[bytes], most_bytes: int, from_line: int, *, has_metadata: bool) -> Iterator[Line]:
    number = 0
    # Reads no more than the limit: a file may have no line ends at all.
    while text := file.readline(most_bytes + 2):
        number += 1
        payload = text.removesuffix(b"\n").removesuffix(b"\r")
        if len(payload) > most_bytes:
            raise ValueError(f"line {number:,} is longer than processors.max_message_bytes ({most_bytes:,}) allows")
        if payload and number >= from_line:
            yield _with_metadata(number, payload) if has_metadata else Line(number, payload, None)


def _with_metadata(number: int, text: bytes) -> Line:
    try:
        row = json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number:,} is not valid JSON: {error}") from None
    if not isinstance(row, dict) or "data" not in row or row.keys() - {"data", "metadata"}:
        raise ValueError(f'line {number:,} must be {{"data": ..., "metadata": {{...}}}}')
    data, metadata = row["data"], row.get("metadata")
    if not isinstance(metadata, dict | None):
        raise ValueError(f"metadata of line {number:,} must be an object, got {type(metadata).__name__}")
    try:
        json.dumps(metadata, allow_nan=False)
        payload = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
    except ValueError:  # Python reads 1e400 as infinite
        raise ValueError(f"line {number:,} contains a number that JSON cannot represent") from None
    return Line(number, payload.encode(errors="surrogatepass"), metadata)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not allowed")
