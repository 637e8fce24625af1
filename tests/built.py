"""Pipelines built in a line, to see which of them are refused."""

from typing import Any

from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline


def build(*bases: type, **attributes: Any) -> type[Pipeline]:
    """A class `Flights` that handles messages, but for these attributes; `...` takes one away."""

    def handle_message(self, message, context):
        return message

    said = {"name": "p", "producer": Producer(source="s"), "handle_message": handle_message, **attributes}
    said = {name: value for name, value in said.items() if value is not ...}
    return type("Flights", (*bases, Pipeline), said)
