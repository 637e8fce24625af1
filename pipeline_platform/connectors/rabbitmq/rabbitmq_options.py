"""Options of a RabbitMQ source, with AMQP's names for AMQP's options, and explanations of errors."""

import ast
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import BaseModel, Field, field_validator, model_validator

from pipeline_platform.model.actions import AckAction, AckActions
from pipeline_platform.model.safe_text import is_ambiguous
from pipeline_platform.model.strict_options import nearest
from pipeline_platform.source.connection import ConnectedSource
from pipeline_platform.source.contract import SourceError
from pipeline_platform.source.options import host
from pipeline_platform.source.pauses import BackoffType, Patience

AGAIN_S = 60.0
"""Seconds that a run tries to connect: the lifetime of a claim that is not renewed."""
_SECONDS, _DICT, _TEXT = "a number of seconds, 0 or more", "a Python dict literal", "text"
PARAMETERS: Mapping[str, str | tuple[int, int]] = {
    "blocked_connection_timeout": _SECONDS, "channel_max": (1, 65_535), "client_properties": _DICT,
    "connection_attempts": (1, 2**31 - 1), "frame_max": (4_096, 131_072), "heartbeat": (0, 65_535), "locale": _TEXT,
    "retry_delay": _SECONDS, "socket_timeout": _SECONDS, "ssl_options": _DICT, "stack_timeout": _SECONDS,
    "tcp_options": _DICT,
}  # fmt: skip
"""Parameters of a URL that pika 1.4 reads, each with the least and greatest whole number or a description."""
STREAM = (
    "is a stream: it delivers every message to every consumer and removes none, so a run could not acknowledge. "
    "Use a classic or quorum queue."
)


ACK_ACTIONS: AckActions = {
    "ack": AckAction(ends=True),
    "reject": AckAction(ends=True),
    "reject_and_requeue": AckAction(ends=False),
    "reject_and_requeue_once": AckAction(ends=False, again="reject"),
    "release": AckAction(ends=False, gives_back=True),
    "noop": AckAction(ends=False),
}
"""Quorum queues count `reject_and_requeue` as a failed delivery; from RabbitMQ 4.3 on, they do not count `release`."""


class Declare(BaseModel, extra="forbid", frozen=True):
    """Declaration of the queue, repeated for each connection."""

    passive: bool = Field(False, description="Only check that the queue exists.")
    durable: bool = Field(True, description="Whether the queue survives a restart of the server.")
    arguments: dict[str, Any] = Field({}, description="Arguments of the queue, as in {'x-queue-type': 'quorum'}.")
    exclusive: Literal[False] = Field(False, description="Must be false: a run and its sensor connect separately.")
    auto_delete: Literal[False] = Field(False, description="Must be false: the queue would be deleted after each run.")

    @field_validator("exclusive", "auto_delete", mode="before")
    @classmethod
    def _outlasts_a_run(cls, value: object) -> object:
        if value is True:
            raise ValueError(
                "must be False: the queue would be deleted between two runs, with the messages that arrive meanwhile. "
                "Remove the option. To delete an unused queue, use the argument x-expires."
            )
        return value

    @field_validator("arguments")
    @classmethod
    def _is_no_stream(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments.get("x-queue-type") == "stream":
            raise ValueError(f"x-queue-type {STREAM}")
        return arguments


class Binding(BaseModel, extra="forbid", frozen=True):
    """Binding of the queue to an exchange."""

    exchange: str = Field(min_length=1)
    routing_key: str = ""
    arguments: dict[str, Any] = {}


class ConsumeOptions(BaseModel, extra="forbid", frozen=True):
    """Options of a run's consumer. A run always acknowledges, so there is no `no_ack`."""

    consumer_tag: str = Field("", description="Name of the consumer; the server generates one by default.")
    exclusive: bool = Field(False, description="Refuse other consumers, including other runs.")
    arguments: dict[str, Any] = Field({}, description="Arguments of the consumer, as in {'x-priority': 10}.")


class RabbitmqOptions(ConnectedSource):
    """Options of a RabbitMQ source."""

    url: str = Field(
        repr=False,
        description="amqp://user:password@host:port/vhost, or amqps:// for TLS. Write the virtual host '/' as %2F. "
        "Query parameters such as ?heartbeat=30&socket_timeout=5 are passed to pika.",
    )
    queue: str = Field(min_length=1, description="Name of the queue.")
    declare: Declare | None = Field(None, description="Declare the queue; by default it must exist.")
    bindings: tuple[Binding, ...] = Field(
        (), description="Bindings of the queue to exchanges, made on each connection."
    )
    prefetch_count: int | None = Field(
        None, ge=1, description="Maximum unacknowledged messages of a run; by default its demand."
    )
    wait_time_s: float = Field(
        0.0, ge=0, le=60, description="Seconds that a run waits for more messages at the end of the queue."
    )
    consume_options: ConsumeOptions = Field(
        ConsumeOptions(), description="Options of the consumer: consumer_tag, exclusive and arguments."
    )
    message_id_header: str | None = Field(
        None, min_length=1, description="Header with a message's id; by default the property message_id is used."
    )
    deduplicate_publishes: bool = Field(
        False,
        description="Look up the id of every message, for publishers that may send a message twice: each run reads the "
        "ids decided within the pipeline's deduplicate_for. `reject_and_requeue_once` then never requeues.",
    )
    connection_name: str | None = Field(
        None, description="Name of the connection at the server; by default the name of the source."
    )
    backoff_type: BackoffType = Field(
        "rand_exp", description="Growth of the pauses between a run's attempts to connect; `stop` makes one attempt."
    )
    backoff_min_s: float = Field(1.0, gt=0, description="Shortest pause, in seconds.")
    backoff_max_s: float = Field(30.0, gt=0, description="Longest pause, in seconds.")

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        try:
            address = urlsplit(url)
            right = address.scheme in {"amqp", "amqps"} and address.hostname and (address.port or 1) > 0
            right = right and not is_ambiguous(url) and not address.fragment
        except ValueError:
            right = False
        if not right:
            raise ValueError(
                "must be amqp://user:password@host:port/vhost or amqps://... Write special characters as %XX."
            )
        given = set[str]()
        for name, value in parse_qsl(address.query, keep_blank_values=True):
            if name not in PARAMETERS:
                meant = nearest(name, PARAMETERS, 0.6)  # the name itself may be a part of a password
                hint = f"Did you mean {meant!r}?" if meant else f"Valid parameters: {', '.join(PARAMETERS)}."
                raise ValueError(f"contains a parameter that pika does not support. {hint}")
            if name in given or not _fits(value, allowed := PARAMETERS[name]):
                wanted = "a whole number from {:,} to {:,}".format(*allowed) if type(allowed) is tuple else allowed
                raise ValueError(f"parameter {name!r} must be given once and be {wanted}. Correct or remove it.")
            given.add(name)
        return url

    @model_validator(mode="after")
    def _pauses_have_a_range(self) -> Self:
        if self.backoff_min_s > self.backoff_max_s:
            raise ValueError(
                f"backoff_min_s must not exceed backoff_max_s ({self.backoff_max_s:g}), got {self.backoff_min_s:g}. "
                "Lower it."
            )
        return self

    @property
    def places(self) -> frozenset[str]:
        """The queue of a virtual host. The ports 5671 and 5672 belong to one broker."""
        parts = urlsplit(self.url)
        port = "" if parts.port in (None, 5671, 5672) else f":{parts.port}"
        vhost = unquote(parts.path.removeprefix("/")) or "/"
        return frozenset({f"queue {self.queue!r} at {host(parts.hostname)}{port}, virtual host {vhost!r}"})

    @property
    def ack_actions(self) -> AckActions:
        """`reject` drops or dead-letters a message, `noop` leaves it until the connection closes."""
        return ACK_ACTIONS

    @property
    def patience(self) -> Patience:
        """The backoff options, for up to a minute."""
        return Patience(self.backoff_type, self.backoff_min_s, self.backoff_max_s, AGAIN_S)


def explained(error: BaseException, source: RabbitmqOptions) -> SourceError:
    """Return an error that explains an error of pika, a socket or TLS, without the password."""
    address = urlsplit(source.url)
    name = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    code = str(getattr(error, "reply_code", type(error).__name__))
    text = f"{code} {str(getattr(error, 'reply_text', error)) or 'no reason given'}"
    found = (explanation for pattern, explanation in _EXPLANATIONS.items() if re.search(pattern, text, re.IGNORECASE))
    explanation = next(found).format(
        queue=source.queue,
        server=f"{name}:{address.port or (5671 if address.scheme == 'amqps' else 5672)}",
        user=unquote(address.username or "guest"),
        vhost=unquote(address.path.removeprefix("/")) or "/",
        text=text,
    )
    return source.error(explanation, away=bool(re.search(_AWAY, text)))


def _fits(value: str, allowed: str | tuple[int, int]) -> bool:
    try:
        if isinstance(allowed, tuple):
            return allowed[0] <= int(value) <= allowed[1]
        if allowed == _SECONDS:
            return 0 <= float(value) < math.inf
        return allowed == _TEXT or isinstance(ast.literal_eval(value), dict)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


# A server that shuts down sends 320 to its clients; 541 is an internal error.
_GONE = (
    "^(320|541|AMQPConnect|AMQPHeartbeat|StreamLost|Connection(Reset|Refused|Aborted|OpenAborted)|Timeout|OSError"
    "|BrokenPipe)"
)
_LATE, _SHORT, _UNKNOWN_HOST = "^406 .*timed out", "^ConnectionBlocked", "^gaierror"
# pika reports a lost connection as a refusal, by the phase in which it was lost.
_CUT = "^(IncompatibleProtocol|ProbableAuthentication|ProbableAccessDenied).*StreamLost|^SSLEOF"
_AWAY = "|".join((_GONE, _LATE, _SHORT, _UNKNOWN_HOST, _CUT))
"""Errors that may be retried."""

_EXPLANATIONS = {
    _CUT: "{server} closed the connection before it was open ({text}). Start the server, or correct url: amqp:// and "
    "port 5672 for AMQP 0-9-1, amqps:// and port 5671 for TLS; user, password and virtual host.",
    "^404 .*no queue": "queue {queue!r} does not exist (virtual host {vhost!r} in url). Create it, correct queue, or "
    "set declare.",
    "^404 .*no exchange": "an exchange does not exist ({text}). Create it, for example in after_connect of a subclass, "
    "or correct bindings or the metadata of sent messages.",
    "^403 .*exclusive": "queue {queue!r} has an exclusive consumer ({text}). Stop that consumer, or remove "
    "consume_options.exclusive, with which runs exclude each other.",
    "^ProbableAuthentication|^AuthenticationError|login was refused": "{server} rejected user {user!r}. Correct user "
    "and password in url.",
    "^ProbableAccessDenied|^530 .*vhost": "virtual host {vhost!r} at {server} does not exist, or user {user!r} has no "
    "access to it ({text}). Correct url; write the virtual host '/' as %2F.",
    "^403 ": "user {user!r} lacks a permission ({text}). Grant read on the queue; for declare and bindings also "
    "configure and write; to send, write on the exchanges.",
    "^405 ": "queue {queue!r} is exclusive to another connection ({text}). Use a queue that is not exclusive.",
    _LATE: "the server requeued messages that were not acknowledged in time ({text}). Lower max_demand of the "
    "pipeline's Processors or prefetch_count, or raise the server's consumer_timeout or the queue's argument "
    "x-consumer-timeout.",
    "^406 .*(inequivalent|invalid arg|unknown arg)": "declare or consume_options.arguments do not match queue "
    "{queue!r} ({text}). Correct them, or set declare.passive.",
    "^IncompatibleProtocol|^SSL": "{server} uses another protocol ({text}). Correct url: amqp:// and port 5672 for "
    "AMQP 0-9-1, amqps:// and port 5671 for TLS with a certificate that this machine trusts.",
    _SHORT: "{server} accepts no messages at the moment: its memory or disk is low ({text}). Free some, or wait.",
    "^(Connection|Channel)ClosedByClient": "the connection was closed by this process.",
    _UNKNOWN_HOST: "the host {server} in url is unknown ({text}). Correct it.",
    _GONE: "{server} does not answer, or closed the connection ({text}). Start the server, or correct url.",
    "": "queue {queue!r} at {server} failed with {text}.",
}
"""Descriptions of errors, by patterns of code and text. The first match counts."""
