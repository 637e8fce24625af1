"""Options of RabbitMQ as a source; those of AMQP with the names that it gives them. What its errors mean for them."""

import ast
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import BaseModel, Field, field_validator, model_validator

from pipeline_platform.model.actions import Word, Words
from pipeline_platform.model.safe_text import is_ambiguous, redacted
from pipeline_platform.model.strict_options import nearest
from pipeline_platform.source.connection import ConnectedSource
from pipeline_platform.source.contract import BackoffType, Patience, SourceAwayError, SourceError
from pipeline_platform.source.options import host

AGAIN_S = 60.0
"""How long a run tries to connect: as long as a claim lasts that nobody renews."""
_SECONDS, _DICT, _TEXT = "seconds, 0 or more", "a dict as Python writes it", "text"
PARAMETERS: Mapping[str, str | tuple[int, int]] = {
    "blocked_connection_timeout": _SECONDS, "channel_max": (1, 65_535), "client_properties": _DICT,
    "connection_attempts": (1, 2**31 - 1), "frame_max": (4_096, 131_072), "heartbeat": (0, 65_535), "locale": _TEXT,
    "retry_delay": _SECONDS, "socket_timeout": _SECONDS, "ssl_options": _DICT, "stack_timeout": _SECONDS,
    "tcp_options": _DICT,
}  # fmt: skip
"""Parameters of a URL, as pika 1.4 reads them: the least and greatest whole number, or what the value must be."""
STREAM = (
    "is a stream: a log that gives every message to everybody and forgets none. A run could acknowledge nothing there. "
    "Name a classic or a quorum queue"
)


WORDS: Words = {
    "ack": Word(ends=True),
    "reject": Word(ends=True),
    "reject_and_requeue": Word(ends=False, gives_back=True),
    "reject_and_requeue_once": Word(ends=False, again="reject"),
    "noop": Word(ends=False),
}


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


class RabbitmqOptions(ConnectedSource):
    """The options of a source of RabbitMQ."""

    url: str = Field(
        repr=False,
        description="amqp://user:password@host:port/vhost, or amqps:// for TLS. The virtual host '/' is written %2F. "
        "Parameters such as ?heartbeat=30&socket_timeout=5 are pika's.",
    )
    queue: str = Field(min_length=1, description="Name of the queue.")
    declare: Declare | None = Field(None, description="Declare the queue; if unset it has to be there.")
    bindings: tuple[Binding, ...] = Field((), description="Bindings of the queue to exchanges, made when connecting.")
    prefetch_count: int | None = Field(
        None, ge=1, description="Messages that a run holds at the most; if unset as many as its demand."
    )
    wait_time_s: float = Field(0.0, ge=0, le=60, description="Seconds that a run waits at the end of the queue.")
    consume_options: ConsumeOptions = Field(ConsumeOptions(), description="consumer_tag, exclusive and arguments.")
    message_id_header: str | None = Field(
        None, min_length=1, description="Header that holds a message's id; the property message_id if unset."
    )
    deduplicate_publishes: bool = Field(
        False,
        description="Look up the id of every message, for publishers that may send one twice: each run reads what was "
        "decided within the pipeline's deduplicate_for. `reject_and_requeue_once` requeues nothing then.",
    )
    connection_name: str | None = Field(None, description="Shown by the server; the name of the source if unset.")
    backoff_type: BackoffType = Field(
        "rand_exp", description="How the pauses between a run's tries to connect grow; `stop` has it try once."
    )
    backoff_min_s: float = Field(1.0, gt=0, description="Seconds of the shortest pause.")
    backoff_max_s: float = Field(30.0, gt=0, description="Seconds of the longest pause.")

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
            raise ValueError("must be amqp://user:password@host:port/vhost or amqps://..., special characters as %XX")
        given = set[str]()
        for name, value in parse_qsl(address.query, keep_blank_values=True):
            if name not in PARAMETERS:
                meant = nearest(name, PARAMETERS, 0.6)  # the name itself may be a part of a password
                hint = f"did you mean {meant!r}?" if meant else f"valid parameters are {', '.join(PARAMETERS)}"
                raise ValueError(f"has a parameter that pika does not have; {hint}")
            if name in given or not _fits(value, allowed := PARAMETERS[name]):
                wanted = "a whole number from {:,} to {:,}".format(*allowed) if type(allowed) is tuple else allowed
                raise ValueError(f"parameter {name!r} must be given once and be {wanted}. Correct it, or leave it out")
            given.add(name)
        return url

    @model_validator(mode="after")
    def _pauses_have_a_range(self) -> Self:
        if self.backoff_min_s > self.backoff_max_s:
            raise ValueError(
                f"backoff_min_s is {self.backoff_min_s:g}, above backoff_max_s ({self.backoff_max_s:g}): lower it"
            )
        return self

    @property
    def places(self) -> frozenset[str]:
        """The queue of a virtual host. Both default ports are of one broker."""
        parts = urlsplit(self.url)
        port = "" if parts.port in (None, 5671, 5672) else f":{parts.port}"
        vhost = unquote(parts.path.removeprefix("/")) or "/"
        return frozenset({f"queue {self.queue!r} at {host(parts.hostname)}{port}, virtual host {vhost!r}"})

    @property
    def words(self) -> Words:
        """`reject` drops or dead-letters a message, `noop` leaves it until the connection closes."""
        return WORDS

    @property
    def patience(self) -> Patience:
        """By the options, for up to a minute."""
        return Patience(self.backoff_type, self.backoff_min_s, self.backoff_max_s, AGAIN_S)


def explained(error: BaseException, source: RabbitmqOptions) -> SourceError:
    """Say what to do about an error of pika, a socket or TLS; never what the password is."""
    address = urlsplit(source.url)
    name = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    code = str(getattr(error, "reply_code", type(error).__name__))
    text = f"{code} {str(getattr(error, 'reply_text', error)) or 'no reason given'}"
    found = (way_out for pattern, way_out in _EXPLANATIONS.items() if re.search(pattern, text, re.IGNORECASE))
    way_out = next(found).format(
        queue=source.queue,
        server=f"{name}:{address.port or (5671 if address.scheme == 'amqps' else 5672)}",
        user=unquote(address.username or "guest"),
        vhost=unquote(address.path.removeprefix("/")) or "/",
        text=text,
    )
    kind = SourceAwayError if re.search(_AWAY, text) else SourceError
    return kind(redacted(f"source {source.name!r}: {way_out}", source.secrets))


def _fits(value: str, allowed: str | tuple[int, int]) -> bool:
    """Whether pika takes the value of a URL's parameter."""
    try:
        if isinstance(allowed, tuple):
            return allowed[0] <= int(value) <= allowed[1]
        if allowed == _SECONDS:
            return 0 <= float(value) < math.inf
        return allowed == _TEXT or isinstance(ast.literal_eval(value), dict)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


# A server that stops says 320 to its clients, and 541 where a part of it fails.
_GONE = (
    "^(320|541|AMQPConnect|AMQPHeartbeat|StreamLost|Connection(Reset|Refused|Aborted|OpenAborted)|Timeout|OSError"
    "|BrokenPipe)"
)
_LATE, _SHORT, _UNKNOWN_HOST = "^406 .*timed out", "^ConnectionBlocked", "^gaierror"
# What pika takes for a refusal, by how far it came, is one only where the server said so.
_CUT = "^(IncompatibleProtocol|ProbableAuthentication|ProbableAccessDenied).*StreamLost|^SSLEOF"
_AWAY = "|".join((_GONE, _LATE, _SHORT, _UNKNOWN_HOST, _CUT))
"""What may be tried again."""

_EXPLANATIONS = {
    _CUT: "{server} ended the connection before it was open ({text}). Start the server, or correct url: amqp:// and "
    "port 5672 for AMQP 0-9-1, amqps:// and port 5671 for TLS; user, password and virtual host",
    "^404 .*no queue": "queue {queue!r} is not there (virtual host {vhost!r} in url). Create it, correct queue, or set "
    "declare",
    "^404 .*no exchange": "an exchange is not there ({text}). Create it, as a subclass may in after_connect, or "
    "correct bindings or the metadata of what is sent",
    "^403 .*exclusive": "another consumer has queue {queue!r} for itself ({text}). End that one, or leave "
    "consume_options.exclusive out, with which runs refuse each other",
    "^ProbableAuthentication|^AuthenticationError|login was refused": "user {user!r} is refused at {server}. Correct "
    "user and password in url",
    "^ProbableAccessDenied|^530 .*vhost": "virtual host {vhost!r} at {server} is not there, or not for user {user!r} "
    "({text}). Correct url; the virtual host '/' is written %2F",
    "^403 ": "user {user!r} lacks a permission ({text}). Grant it read on the queue, with declare and bindings also "
    "configure and write, and write on exchanges to send",
    "^405 ": "queue {queue!r} is another connection's alone ({text}). Name one that is not exclusive",
    _LATE: "the server took back what was not acknowledged in time ({text}). Have runs take on less (max_demand "
    "of the pipeline's Processors, or prefetch_count), or raise the server's consumer_timeout, or the queue's argument "
    "x-consumer-timeout",
    "^406 .*(inequivalent|invalid arg|unknown arg)": "declare or consume_options.arguments do not suit queue {queue!r} "
    "as it is ({text}). Correct them, or set declare.passive",
    "^IncompatibleProtocol|^SSL": "what answers at {server} speaks another protocol ({text}). url has amqp:// and port "
    "5672 for AMQP 0-9-1, amqps:// and port 5671 for TLS with a certificate that this machine trusts",
    _SHORT: "{server} takes no messages now: it lacks memory or disk ({text})",
    "^(Connection|Channel)ClosedByClient": "the connection was closed here",
    _UNKNOWN_HOST: "the host in url is unknown: {server} ({text}). Correct it",
    _GONE: "{server} does not answer, or ended the connection ({text}). Start the server, or correct url",
    "": "queue {queue!r} at {server} failed with {text}",
}
"""What to do about an error, by its code and text. The first that fits counts."""
