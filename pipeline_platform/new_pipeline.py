"""The text of a new pipeline, its test and its source: `pipeline-platform new` and `dg scaffold` write it."""

import json
import re
from enum import Enum
from string import Template
from typing import Any

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.home import home


class Kind(Enum):
    """Where a new pipeline pulls from."""

    table = "table"
    sqs = "sqs"
    kafka = "kafka"
    rabbitmq = "rabbitmq"
    pubsub = "pubsub"


_CONNECTORS: dict[Kind, tuple[str, str, dict[str, Any]]] = {
    Kind.table: ("table_queue", "TableQueue", {"url": "sqlite:///{home}/$key.sqlite", "created_column": "created_at"}),
    Kind.sqs: ("sqs", "SqsSource", {"queue_url": {"env": "${NAME}_QUEUE_URL"}}),
    Kind.kafka: (
        "kafka",
        "KafkaSource",
        {"bootstrap_servers": {"env": "${NAME}_BOOTSTRAP_SERVERS"}, "group_id": "$name", "topics": ["$name"]},
    ),
    Kind.rabbitmq: ("rabbitmq", "RabbitmqSource", {"url": {"env": "${NAME}_RABBITMQ"}, "queue": "$name"}),
    Kind.pubsub: ("pubsub", "PubsubSource", {"subscription": {"env": "${NAME}_SUBSCRIPTION"}}),
}
"""Of each kind: the connector's module and class, and its options; `env` names a variable, `{home}` is `home()`."""

_SOURCE = '''\
"""The source of `$name`."""

${imports}from $connector_module import $connector
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
from $package.$name import $Class, Row


def test_a_message_becomes_a_row_and_one_that_does_not_fit_fails_alone() -> None:
    """Put your messages here."""
    fits, fits_not = b'{"number": 1, "text": "one"}', b'{"number": "one"}'

    done = test_batch($Class, [fits, fits_not])

    assert [message.data for message in done.successful] == [Row(number=1, text="one")]
    assert [message.data for message in done.failed] == [fits_not]
'''


class NewPipeline:
    """A pipeline that is to be written.

    Args:
        name: Of the pipeline: small letters, digits and _, a letter first.
        source: Where it pulls from.
        package: The Python package that the class and its test are written into.

    Raises:
        ValueError: The name is not as above.
    """

    def __init__(self, name: str, source: Kind, package: str) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"{name!r}: small letters, digits and _, and a letter first")
        module, self.connector, options = _CONNECTORS[source]
        self.kind, self.key = source, f"{name}_queue"
        self.class_name = "".join(part.capitalize() for part in name.split("_"))
        self.connector_module = f"pipeline_platform.connectors.{module}"
        self._words = {
            "name": name,
            "key": self.key,
            "Class": self.class_name,
            "NAME": name.upper(),
            "package": package,
        }
        self.options: dict[str, Any] = json.loads(self._filled(json.dumps(options)))
        """Of the source: `{"env": ...}` stands for a variable, and `{home}` in a text for the deployment's folder."""

    @property
    def pipeline(self) -> str:
        """The file of the class."""
        return self._filled(_PIPELINE)

    @property
    def test(self) -> str:
        """The file of its test."""
        return self._filled(_TEST)

    @property
    def source(self) -> str:
        """The file of its source, a Dagster resource."""
        table = self.kind is Kind.table
        return self._filled(
            _SOURCE,
            connector_module=self.connector_module,
            connector=self.connector,
            imports="" if table else "import dagster as dg\n\n",
            home="from pipeline_platform.home import home\n" if table else "",
            options="\n".join(f"    {name}={_python(value)}," for name, value in self.options.items()),
        )

    def make_ready(self) -> str:
        """Make the queue, if it is a file, and say so; else say which variable to set."""
        variables = [value["env"] for value in self.options.values() if isinstance(value, dict)]
        if variables:
            return f"set {variables[0]}, or write it into .env"
        options = {**self.options, "url": self.options["url"].format(home=home())}
        TableQueue(name=self.key, **options).create()
        return f"made the queue {options['url']}"

    def _filled(self, text: str, **words: str) -> str:
        return Template(text).substitute(self._words, **words)


def _python(value: Any) -> str:
    """An option's value as Python."""
    if isinstance(value, dict):
        return f'dg.EnvVar("{value["env"]}")'
    text = json.dumps(value)
    return "f" + text.replace("{home}", "{home()}") if "{home}" in text else text
