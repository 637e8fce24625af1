"""`pipeline-platform push`: messages of a file into a pipeline's source, a line each."""

import json
import time
from collections.abc import Iterator
from typing import IO, Annotated, Any, NamedTuple

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.failure_commands import Name
from pipeline_platform.cli.limit_commands import chosen
from pipeline_platform.cli.terminal import say
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.portions import portions
from pipeline_platform.source.contract import Source, SourceError

_TOGETHER, _BYTES = 1_000, 8 * 2**20
"""Messages, and bytes of them, that are sent at once: what is held in memory, and what an error leaves unsaid."""
_EVERY_S = 2.0

_FILE = "File with one message a line; `-` for standard input. Empty lines are skipped."
_METADATA = 'A line is {"data": ..., "metadata": {...}}; without this, a line is a payload.'
_FROM = "Begin with this line: an earlier call has sent the lines before it."


class Line(NamedTuple):
    """A message of a file, and the number of its line from 1 on."""

    number: int
    payload: bytes
    metadata: dict[str, Any] | None


def push(
    pipeline: Name,
    file: Annotated[typer.FileBinaryRead, typer.Option(help=_FILE)],
    metadata: Annotated[bool, typer.Option("--metadata", help=_METADATA)] = False,
    from_line: Annotated[int, typer.Option(min=1, help=_FROM)] = 1,
    producer: Annotated[str, typer.Option(help="Producer whose source it is, where the pipeline has several.")] = "",
) -> None:
    """Send messages to the source of a pipeline."""
    with chosen(pipeline, producer) as (opened, of):
        source = opened.sources[_producer(of, producer)]
        try:
            sent = _push(source, file, of.processors.max_message_bytes, from_line, has_metadata=metadata)
        except SourceError as error:
            say(str(error), err=True)
            raise typer.Exit(1) from None
    say(f"Sent {loading.counted(sent, 'message')} to {source.name}.")


def _producer(pipeline: type[Pipeline], producer: str) -> str:
    producers = pipeline.producers_of(producer)
    if len(producers) > 1:
        several = f"{pipeline.name} has several: choose one of {', '.join(producers)}"
        raise typer.BadParameter(several, param_hint="--producer")
    (only,) = producers.values()
    return only.source


def _push(source: Source, file: IO[bytes], most_bytes: int, from_line: int, *, has_metadata: bool) -> int:
    """Send lines, some at a time; return how many were sent.

    Raises:
        SourceError: The source takes none, or refused some: names the line to go on from.
        BadParameter: A line cannot be sent: the same.
    """
    lines, sent, reported = _lines(file, most_bytes, from_line, has_metadata=has_metadata), 0, time.monotonic()
    parts = portions(lines, lambda line: len(line.payload), _BYTES, _TOGETHER)
    while True:
        try:
            some = next(parts, [])
        except ValueError as error:
            way_out = f"mend it, and go on with --from-line {from_line}"
            unsent = f"{error}; nothing from line {from_line:,} on is sent: {way_out}"
            raise typer.BadParameter(unsent, param_hint="--file") from None
        if not some:
            return sent
        try:
            notes = [line.metadata for line in some] if any(line.metadata for line in some) else None
            sent += source.send([line.payload for line in some], notes)
        except SourceError as error:
            where = f"lines {some[0].number:,} to {some[-1].number:,}"
            before = f"; {sent:,} messages before are sent. Go on with --from-line {some[0].number}" if sent else ""
            raise SourceError(f"{where} were not all taken: {error}{before}") from None
        from_line = some[-1].number + 1
        if time.monotonic() - reported > _EVERY_S:
            say(f"{sent:,} messages, up to line {some[-1].number:,}", err=True)
            reported = time.monotonic()


def _lines(file: IO[bytes], most_bytes: int, from_line: int, *, has_metadata: bool) -> Iterator[Line]:
    number = 0
    # Never a whole line that is too long: a file may have no ends of lines at all.
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
        raise ValueError(f"line {number:,} is no JSON: {error}") from None
    if not isinstance(row, dict) or "data" not in row or row.keys() - {"data", "metadata"}:
        raise ValueError(f'line {number:,} must be {{"data": ..., "metadata": {{...}}}}, and is not')
    data, metadata = row["data"], row.get("metadata")
    if not isinstance(metadata, dict | None):
        raise ValueError(f"metadata of line {number:,} must be an object, not {type(metadata).__name__}")
    try:
        json.dumps(metadata, allow_nan=False)
        payload = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
    except ValueError:  # Python reads 1e400 as infinite
        raise ValueError(f"line {number:,} holds a number that JSON has no place for") from None
    return Line(number, payload.encode(errors="surrogatepass"), metadata)


def _refused(constant: str) -> None:
    raise ValueError(f"it has no {constant}")
