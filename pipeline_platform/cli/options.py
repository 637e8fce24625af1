"""Arguments and options that several commands have in common."""

from typing import Annotated

import typer

from pipeline_platform.cli.completion import pipeline_names

Name = Annotated[str, typer.Argument(help="Name of the pipeline.", autocompletion=pipeline_names)]
OptionalName = Annotated[
    str | None, typer.Argument(help="Only this pipeline.", show_default=False, autocompletion=pipeline_names)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, on one line.")]
