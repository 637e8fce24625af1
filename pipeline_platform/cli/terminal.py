"""Text on the terminal: what users and messages contribute only shows, it steers nothing."""

import typer

from pipeline_platform.model.safe_text import printable


def plain(text: str) -> str:
    """Return text of several lines without control characters."""
    return printable(text, keep="\n\t")


def say(text: str, *, err: bool = False) -> None:
    """Print text that may contain anything."""
    typer.echo(plain(text), err=err)
