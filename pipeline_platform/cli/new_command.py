"""`pipeline-platform new`: a pipeline in this checkout, its source, a test, and its lines in `definitions.py`."""

import re
from enum import Enum
from pathlib import Path
from string import Template
from typing import Annotated

import dotenv
import typer

from pipeline_platform.cli.loading import SetUpError
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.home import home


class Kind(Enum):
    """Where a new pipeline pulls from."""

    table = "table"
    sqs = "sqs"
    kafka = "kafka"
    rabbitmq = "rabbitmq"
    pubsub = "pubsub"


_CONNECTORS = {
    Kind.table: ("table_queue", "TableQueue", ('url=f"sqlite:///{home()}/$key.sqlite"', 'created_column="created_at"')),
    Kind.sqs: ("sqs", "SqsSource", ('queue_url=dg.EnvVar("${NAME}_QUEUE_URL")',)),
    Kind.kafka: (
        "kafka",
        "KafkaSource",
        ('bootstrap_servers=dg.EnvVar("${NAME}_BOOTSTRAP_SERVERS")', 'group_id="$name"', 'topics=["$name"]'),
    ),
    Kind.rabbitmq: ("rabbitmq", "RabbitmqSource", ('url=dg.EnvVar("${NAME}_RABBITMQ")', 'queue="$name"')),
    Kind.pubsub: ("pubsub", "PubsubSource", ('subscription=dg.EnvVar("${NAME}_SUBSCRIPTION")',)),
}
"""Of each kind: the connector's module and class, and its options; `name` comes before them."""

_SOURCE = '''\
"""The source of `$name`."""

${imports}from pipeline_platform.connectors.$module import $connector
${home}from pipeline_platform.orchestration import source_resource

$key = source_resource($connector)(
    name="$key",
$options
)
'''

_PIPELINE = '''\
"""The pipeline `$name`: what its messages are, and what becomes of them."""

from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, TableBatcher


class Row(BaseModel):
    """A row of the table `$name/lake`, and the JSON of a message: put your fields here."""

    number: int
    text: str | None = None


class $Class(Pipeline):
    """Every message a row, each once."""

    name = "$name"
    producer = Producer(source="$key", patience=timedelta(seconds=5))
    batchers = {"lake": TableBatcher(schema=Row)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Put a message into the table; one that does not fit `Row` fails, and waits in `$name/failed`."""
        del context
        return message.put(message.json(Row), batcher="lake")
'''

_TEST = '''\
"""The callbacks of `$name`, called as a run calls them: no Spark, no queue."""

from pipeline_platform.testing import test_batch
from pipelines.$name import $Class, Row


def test_a_message_becomes_a_row_and_one_that_does_not_fit_fails_alone() -> None:
    """Put your messages here."""
    fits, fits_not = b'{"number": 1, "text": "one"}', b'{"number": "one"}'

    done = test_batch($Class, [fits, fits_not])

    assert [message.data for message in done.successful] == [Row(number=1, text="one")]
    assert [message.data for message in done.failed] == [fits_not]
'''


def new(
    name: Annotated[str, typer.Argument(help="Of the pipeline: small letters, digits and _, such as `orders`.")],
    source: Annotated[Kind, typer.Option(help="Where it pulls from.")] = Kind.table,
) -> None:
    """Write a pipeline into this checkout: it runs at once, and is yours to change."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise typer.BadParameter(f"{name!r}: small letters, digits and _, and a letter first", param_hint="NAME")
    dotenv.load_dotenv(Path(".env"))
    key, definitions = f"{name}_queue", Path("definitions.py")
    module, connector, options = _CONNECTORS[source]
    words = {
        "name": name,
        "key": key,
        "Class": "".join(part.capitalize() for part in name.split("_")),
        "NAME": name.upper(),
        "module": module,
        "connector": connector,
        "imports": "" if source is Kind.table else "import dagster as dg\n\n",
        "home": "from pipeline_platform.home import home\n" if source is Kind.table else "",
    }
    words["options"] = "\n".join(f"    {Template(option).substitute(words)}," for option in options)
    texts = {f"pipelines/{name}.py": _PIPELINE, f"pipelines/test_{name}.py": _TEST, f"resources/{key}.py": _SOURCE}
    files = {Path(path): Template(text).substitute(words) for path, text in texts.items()}
    if taken := [str(path) for path in files if path.exists()]:
        raise SetUpError(f"{', '.join(taken)} is there already: choose another name, or remove what is there")
    files[definitions] = _with_lines(definitions, name, key, words["Class"])
    for path, text in files.items():
        path.write_text(text)
        typer.echo(f"wrote {path}")
    if source is Kind.table:
        home().mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{home()}/{key}.sqlite"
        TableQueue(name=key, url=url, created_column="created_at").create()
        typer.echo(f"made the queue {url}")
    elif variable := re.search(r'EnvVar\("(\w+)"\)', words["options"]):
        typer.echo(f"set {variable[1]}, or write it into .env")
    typer.echo(f"test it: python -m pytest pipelines/test_{name}.py; send it messages: pipeline-platform push {name}")


def _with_lines(definitions: Path, name: str, key: str, pipeline: str) -> str:
    """The text of `definitions.py` with a pipeline and its source more.

    Raises:
        SetUpError: It is not here, or is not as in the template: says which lines to add by hand.
    """
    if not definitions.is_file():
        raise SetUpError(f"there is no {definitions} in {Path.cwd()}: go to a checkout of this template")
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
