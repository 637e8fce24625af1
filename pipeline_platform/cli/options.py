"""Arguments and options that several commands have in common."""

from typing import Annotated

import typer

from pipeline_platform.cli import loading


def pipeline_names(incomplete: str) -> list[str]:
    """Return the pipelines of the deployment here whose names start with a text; none if it cannot be loaded."""
    try:
        names = [pipeline.name for pipeline in loading.load().pipelines]
    except Exception:  # a shell cannot show the error of a completion; the command itself does
        return []
    return [name for name in names if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(help="Name of the pipeline.", autocompletion=pipeline_names)]
OptionalName = Annotated[
    str | None, typer.Argument(help="Only this pipeline.", show_default=False, autocompletion=pipeline_names)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, on one line.")]
