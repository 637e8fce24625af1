"""How a queue of an AMQP server is declared, bound and consumed: options with the names that AMQP gives them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

STREAM = (
    "is a stream: a log that gives every message to everybody and forgets none. A run could settle nothing there. "
    "Name a classic or a quorum queue"
)


class Declare(BaseModel, extra="forbid", frozen=True):
    """How the queue is declared, each time something connects."""

    passive: bool = Field(False, description="Only check that it is there.")
    durable: bool = Field(True, description="Whether it outlasts a restart of the server.")
    arguments: dict[str, Any] = Field({}, description="As in {'x-queue-type': 'quorum'}.")
    exclusive: Literal[False] = Field(False, description="A run and its sensor have a connection each.")
    auto_delete: Literal[False] = Field(False, description="The queue would end with each run.")

    @field_validator("exclusive", "auto_delete", mode="before")
    @classmethod
    def _outlasts_a_run(cls, value: object) -> object:
        if value is True:
            raise ValueError(
                "is not for a queue that runs read one after the other: it would be deleted with the messages that "
                "come between two of them. Leave it out, and use the argument x-expires for a queue that nobody needs"
            )
        return value

    @field_validator("arguments")
    @classmethod
    def _is_no_stream(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments.get("x-queue-type") == "stream":
            raise ValueError(f"x-queue-type {STREAM}")
        return arguments


class Binding(BaseModel, extra="forbid", frozen=True):
    """From where the queue is given messages."""

    exchange: str = Field(min_length=1)
    routing_key: str = ""
    arguments: dict[str, Any] = {}


class ConsumeOptions(BaseModel, extra="forbid", frozen=True):
    """How a run consumes. It always acknowledges, so there is no `no_ack`."""

    consumer_tag: str = Field("", description="Name of the consumer; the server makes one if unset.")
    exclusive: bool = Field(False, description="Refuse other consumers meanwhile: other runs, too.")
    arguments: dict[str, Any] = Field({}, description="As in {'x-priority': 10}.")
