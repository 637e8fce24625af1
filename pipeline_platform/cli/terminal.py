"""Safe text for the terminal: text of users and messages cannot control it."""

import typer

from pipeline_platform.model.safe_text import printable


def plain(text: str) -> str:
    """Return text of several lines without control characters."""
    return printable(text, keep="\n\t")


def say(*lines: str, err: bool = False) -> None:
    """Print lines. Control characters are escaped, also line ends, so that an id or a reason cannot forge a line."""
    for line in lines:
        typer.echo(printable(line, keep="\t"), err=err)


def duration(seconds: float) -> str:
    """Return a time in its largest unit, such as `2 h`, `1.5 min` or `0.3 s`."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{_short(seconds / length)} {unit}"
    return f"{_short(seconds)} s"


def _short(number: float) -> str:
    """Return a number with one decimal below ten, without a trailing zero."""
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}".removesuffix(".0")
