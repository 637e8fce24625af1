"""`pipeline-platform new`: add a pipeline to this checkout, with a source, a test, and lines in `definitions.py`."""

import ast
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from pipeline_platform.cli.loading import SetUpError
from pipeline_platform.cli.terminal import say
from pipeline_platform.connectors.new_pipeline import NewPipeline, SourceKind


def new(
    name: Annotated[str, typer.Argument(help="Name of the pipeline: lower-case letters, digits and _.")],
    source: Annotated[SourceKind, typer.Option(help="Kind of source.")] = "table",
) -> None:
    """Add a pipeline that is ready to run to this checkout, as a starting point for your own code."""
    try:
        made = NewPipeline(name, source, package="pipelines")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    key, definitions = made.key, Path("definitions.py")
    files = {
        Path(f"pipelines/{name}.py"): made.pipeline,
        Path(f"pipelines/test_{name}.py"): made.test,
        Path(f"resources/{key}.py"): made.source,
    }
    if taken := [str(path) for path in files if path.exists()]:
        exist = "already exists" if len(taken) == 1 else "already exist"
        raise SetUpError(f"{', '.join(taken)} {exist}. Choose another name, or remove the old files")
    files[definitions] = _with_lines(definitions, name, key, made.class_name)
    for path, text in files.items():
        path.write_text(text)
        say(f"Wrote {path}")
    say(*made.make_ready().split("\n"))
    say(f"Run its test: python -m pytest pipelines/test_{name}.py")
    say(f"Send messages: pipeline-platform push {name} --file FILE")


def _with_lines(definitions: Path, name: str, key: str, pipeline: str) -> str:
    """Return the text of `definitions.py` with a pipeline and its source added."""
    if not definitions.is_file():
        raise SetUpError(
            f"{definitions} does not exist in {Path.cwd()}. Change to a checkout of this template; in a dg project, "
            "use `dg scaffold defs pipeline_platform.orchestration.PipelineComponent`"
        )
    imports = [f"from pipelines.{name} import {pipeline}", f"from resources.{key} import {key}"]
    with suppress(SyntaxError):
        text = _extended(definitions.read_text(), imports, key, pipeline)
        if {key, pipeline} <= {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}:
            return text
    lines = "\n".join([*imports, f'"{key}": {key}  # in the resources', f"{pipeline}  # in the list of pipelines"])
    raise SetUpError(f"Could not extend {definitions}; no file was written. Add these lines manually:\n{lines}")


def _extended(text: str, imports: Sequence[str], key: str, pipeline: str) -> str:
    """Add lines to the text of `definitions.py`. Return it unchanged if it has another form than in this checkout."""
    listed = re.search(r"platform_definitions\(\s*\[([^\]]*?),?\s*\]", text)
    held = re.search(r"^RESOURCES(?:: [^\n]+)? = \{\n(.*?)^\}", text, re.M | re.S)
    above = list(re.finditer(r"^from [\w.]+ import .*\n", text, re.M))
    if not (listed and held and above):
        return text
    # From the end of the text to the start, so that positions stay valid.
    changes = [(held.end(1), f'    "{key}": {key},\n'), (listed.end(1), f"{', ' if listed[1] else ''}{pipeline}")]
    for line in imports:
        later = [other.start() for other in above if other[0] > line + "\n"]
        changes.append((min(later, default=above[-1].end()), line + "\n"))
    for at, more in sorted(changes, reverse=True):
        text = text[:at] + more + text[at:]
    return text
