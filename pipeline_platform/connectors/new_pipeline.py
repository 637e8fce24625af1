"""Templates of a new pipeline, its test and its source, for `pipeline-platform new` and `dg scaffold`."""

import json
from keyword import iskeyword
from string import Template
from typing import Any, Literal

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.home import home
from pipeline_platform.model.strict_options import NAME

SourceKind = Literal["table", "sqs", "kafka", "kinesis", "rabbitmq", "pubsub", "files"]

_CONNECTORS: dict[SourceKind, tuple[str, str, dict[str, Any]]] = {
    "table": (
        "table_queue",
        "TableQueue",
        {"url": "sqlite:///{home}/$key.sqlite", "created_column": "created_at"},
    ),
    "sqs": ("sqs", "SqsSource", {"queue_url": {"env": "${NAME}_QUEUE_URL"}}),
    "kafka": (
        "kafka",
        "KafkaSource",
        {"bootstrap_servers": {"env": "${NAME}_BOOTSTRAP_SERVERS"}, "group_id": "$name", "topics": ["$name"]},
    ),
    "kinesis": ("kinesis", "KinesisSource", {"stream": {"env": "${NAME}_STREAM"}}),
    "rabbitmq": ("rabbitmq", "RabbitmqSource", {"url": {"env": "${NAME}_RABBITMQ"}, "queue": "$name"}),
    "pubsub": ("pubsub", "PubsubSource", {"subscription": {"env": "${NAME}_SUBSCRIPTION"}}),
    "files": (
        "files",
        "FileSource",
        {"root": {"env": "${NAME}_FILES"}, "catalog": "sqlite:///{home}/$key.sqlite"},
    ),
}
"""Module, class and options of the connector of each kind. `env` is the name of a variable; `{home}` is `home()`."""

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
"""The pipeline `$name`: its messages, and how they are handled."""

from typing import Any

from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, TableBatcher


class Row(BaseModel):
    """A row of the table `$name/lake`, and the JSON of a message. Replace the fields by yours."""

    number: int
    text: str | None = None


class $Class(Pipeline):
    """Writes each message to a table as one row."""

    name = "$name"
    producer = Producer(source="$key")
    batchers = {"lake": TableBatcher(schema=Row)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Write a message to the table; a message that does not fit `Row` goes to `$name/failed`."""
        del context
        return message.put(message.json(Row), batcher="lake")
'''

_NAMES = ("Any", "BaseModel", "Message", "Pipeline", "Producer", "Row", "TableBatcher")
"""Names of the template, which a class with the name would replace."""
_NAME = NAME._replace(
    must_be=f"{NAME.must_be}, and neither a keyword of Python nor a name of the template, such as row",
    fix="Choose another name.",
)

_TEST = '''\
"""Tests of the callbacks of `$name`, without Spark and without a queue."""

from pipeline_platform.testing import test_batch
from $package.$name import $Class, Row


def test_an_invalid_message_fails_and_a_valid_message_becomes_a_row() -> None:
    """Replace the messages by yours."""
    valid, invalid = b'{"number": 1, "text": "one"}', b'{"number": "one"}'

    done = test_batch($Class, [valid, invalid])

    assert [message.data for message in done.successful] == [Row(number=1, text="one")]
    assert [message.data for message in done.failed] == [invalid]
'''


class NewPipeline:
    """Files of a new pipeline.

    Args:
        name: Name of the pipeline, and of the module of its class.
        source: Kind of its source.
        package: Python package of the class.

    Raises:
        ValueError: The name is not valid.
    """

    def __init__(self, name: str, source: SourceKind, package: str) -> None:
        self.class_name = "".join(part.capitalize() for part in name.split("_"))
        if not NAME.is_valid(name) or iskeyword(name) or iskeyword(self.class_name) or self.class_name in _NAMES:
            raise ValueError(_NAME.error(name))
        module, self.connector, options = _CONNECTORS[source]
        self.key = f"{name}_queue"
        self.connector_module = f"pipeline_platform.connectors.{module}"
        self._words = {
            "name": name,
            "key": self.key,
            "Class": self.class_name,
            "NAME": name.upper(),
            "package": package,
        }
        self.options: dict[str, Any] = json.loads(self._filled(json.dumps(options)))
        """Options of the source. `{"env": ...}` stands for a variable, and `{home}` for the deployment's folder."""
        self._variables = [value["env"] for value in self.options.values() if isinstance(value, dict)]

    @property
    def pipeline(self) -> str:
        """Text of the file of the class."""
        return self._filled(_PIPELINE)

    @property
    def test(self) -> str:
        """Text of the file of its test."""
        return self._filled(_TEST)

    @property
    def source(self) -> str:
        """Text of the file of its source, a Dagster resource."""
        return self._filled(
            _SOURCE,
            connector_module=self.connector_module,
            connector=self.connector,
            imports="import dagster as dg\n\n" if self._variables else "",
            home="from pipeline_platform.home import home\n" if "{home}" in json.dumps(self.options) else "",
            options="\n".join(f"    {name}={_python(value)}," for name, value in self.options.items()),
        )

    def make_ready(self) -> str:
        """Create the queue if it is a file. Return what was done, or which variable to set, as text."""
        if self._variables:
            return f"set {self._variables[0]} in the environment or in .env"
        options = {**self.options, "url": self.options["url"].format(home=home())}
        TableQueue(name=self.key, **options).create()
        return f"created the queue {options['url']}"

    def _filled(self, text: str, **words: str) -> str:
        return Template(text).substitute(self._words, **words)


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return f'dg.EnvVar("{value["env"]}")'
    text = json.dumps(value)
    return "f" + text.replace("{home}", "{home()}") if "{home}" in text else text
