"""`pipeline-platform new`: a pipeline in this checkout, its source, a test, and its lines in `definitions.py`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from pipeline_platform.cli.loading import SetUpError
from pipeline_platform.cli.terminal import say
from pipeline_platform.new_pipeline import Kind, NewPipeline


def new(
    name: Annotated[str, typer.Argument(help="Of the pipeline: small letters, digits and _, such as `orders`.")],
    source: Annotated[Kind, typer.Option(help="Where it pulls from.")] = Kind.table,
) -> None:
    """Write a pipeline into this checkout: it runs at once, and is yours to change."""
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
        raise SetUpError(f"{', '.join(taken)} is there already: choose another name, or remove what is there")
    files[definitions] = _with_lines(definitions, name, key, made.class_name)
    for path, text in files.items():
        path.write_text(text)
        say(f"wrote {path}")
    say(made.make_ready())
    say(f"test it: python -m pytest pipelines/test_{name}.py; send it messages: pipeline-platform push {name}")


def _with_lines(definitions: Path, name: str, key: str, pipeline: str) -> str:
    """The text of `definitions.py` with a pipeline and its source more.

    Raises:
        SetUpError: It is not here, or is not as in the template: says which lines to add by hand.
    """
    if not definitions.is_file():
        raise SetUpError(
            f"there is no {definitions} in {Path.cwd()}: go to a checkout of this template; "
            "in a project of dg, `dg scaffold defs pipeline_platform.orchestration.PipelineComponent` does it"
        )
    text = definitions.read_text()
    imports = [f"from pipelines.{name} import {pipeline}", f"from resources.{key} import {key}"]
    listed = re.search(r"platform_definitions\(\s*\[([^\]]*?),?\s*\]", text)
    held = re.search(r"^RESOURCES(?:: [^\n]+)? = \{\n(.*?)^\}", text, re.M | re.S)
    above = list(re.finditer(r"^from [\w.]+ import .*\n", text, re.M))
    if not (listed and held and above):
        lines = "\n".join([*imports, f'"{key}": {key}  # in the resources', f"{pipeline}  # in the list of pipelines"])
        raise SetUpError(f"{definitions} is not as in the template: nothing is written. It needs these lines:\n{lines}")
    # From the end of the text to its beginning: what comes before keeps its place.
    changes = [(held.end(1), f'    "{key}": {key},\n'), (listed.end(1), f"{', ' if listed[1] else ''}{pipeline}")]
    for line in imports:
        later = [one.start() for one in above if one[0] > line + "\n"]
        changes.append((min(later, default=above[-1].end()), line + "\n"))
    for at, more in sorted(changes, reverse=True):
        text = text[:at] + more + text[at:]
    return text
