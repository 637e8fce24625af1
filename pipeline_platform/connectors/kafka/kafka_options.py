"""The options of a Kafka source: what may be set, what must fit together, and what the client library gets."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipeline_platform.source.log import LogSource
from pipeline_platform.source.options import host

_TOPIC = r"[a-zA-Z0-9._-]{1,249}"
AT_ONCE = {"fetch_queue_backoff_ms": 2, "queued_min_messages": 20_000, "queued_max_messages_kbytes": 32_768}
"""What `client_options` may set again. By itself the client library holds five times as many messages ready, of which
the last would be thrown away at the end of a range, and waits for a second whenever it holds them, which took half of
the time of reading.
"""
LARGEST = 2_147_483_647
"""Bytes of an answer that a client takes at the most: as many as the client library can."""

_PASSED = (
    "bootstrap_servers", "client_id", "security_protocol", "sasl_mechanism", "sasl_username", "sasl_password",
    "ssl_ca_location", "ssl_certificate_location", "ssl_key_location", "ssl_key_password",
)  # fmt: skip
"""Options that every client gets as they are: the client library has them with dots for underscores."""
_OWNED_FOR = {
    "offsets are committed once all before them is acknowledged": "auto.commit.enable enable.auto.commit "
    "enable.auto.offset.store",
    "offsets that are gone are an error, never skipped": "auto.offset.reset",
    "send() says that messages are safe": "acks request.required.acks",
    "send() sends no message twice": "enable.idempotence",
    "send() begins no transaction": "transactional.id",
    "it ends a range whose last offsets are gaps": "enable.partition.eof",
    "nothing here joins the group": "group.instance.id group.protocol partition.assignment.strategy",
    "set bootstrap_servers": "metadata.broker.list",
    "set fetch_max_wait_s": "fetch.wait.max.ms",
    "set request_timeout_s": "socket.timeout.ms",
    "set sasl_mechanism": "sasl.mechanisms",
}
OWNED = {name: why for why, names in _OWNED_FOR.items() for name in names.split()} | {
    option.replace("_", "."): f"set {option}"
    for option in (*_PASSED, "fetch_max_bytes", "fetch_min_bytes", "group_id", "isolation_level")
}
"""Options of the client library that this connector sets itself, and why or by what."""


class KafkaOptions(LogSource):
    """The options of a Kafka source."""

    bootstrap_servers: str = Field(description="Brokers to begin with: host:port, separated by commas, or a list.")
    group_id: str = Field(min_length=1, description="Consumer group; it has the first offset that is not acknowledged.")
    topics: tuple[Annotated[str, Field(pattern=rf"^{_TOPIC}$")], ...] = Field((), description="Topics to read.")
    topic_pattern: str | None = Field(
        None, description="Regular expression, in place of topics: reads those whose whole names match, also new ones."
    )
    offset_reset_policy: str = Field(
        "earliest",
        description="Where reading begins that the group remembers nothing of: earliest, latest, or "
        "timestamp:<ISO 8601 with a zone>, as in timestamp:2026-01-31T00:00:00Z. Partitions that a topic gains later "
        "are read from their beginning.",
    )
    isolation_level: Literal["read_committed", "read_uncommitted"] = Field(
        "read_committed", description="Whether messages of open and aborted transactions are left out."
    )
    fetch_min_bytes: int = Field(1, ge=1, description="Bytes that a broker waits for before it answers a fetch.")
    fetch_max_bytes: int = Field(
        52_428_800,
        ge=1_000_000,
        le=LARGEST - 512,
        description="Bytes that a broker answers a fetch with at the most; a message that is larger comes alone.",
    )
    fetch_max_wait_s: float = Field(0.5, ge=0, le=300, description="Seconds that a broker waits for fetch_min_bytes.")
    request_timeout_s: float = Field(10.0, ge=2, le=300, description="Seconds that a call to a broker may take.")
    client_id: str = Field("pipeline-platform", description="What brokers call this client in their logs and quotas.")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="How to talk to brokers."
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI"] | None = Field(
        None, description="How to log in, with security_protocol SASL_PLAINTEXT or SASL_SSL."
    )
    sasl_username: str | None = Field(None, description="User to log in.")
    sasl_password: str | None = Field(None, repr=False, description="The user's password.")
    ssl_ca_location: str | None = Field(None, description="File of the certificates that brokers are checked by.")
    ssl_certificate_location: str | None = Field(None, description="File of this client's own certificate.")
    ssl_key_location: str | None = Field(None, description="File of this client's own key.")
    ssl_key_password: str | None = Field(None, repr=False, description="Password of that key.")
    client_options: dict[str, str] = Field(
        {}, repr=False, description="Other options of the client library (librdkafka), by its names."
    )

    @field_validator("bootstrap_servers", mode="before")
    @classmethod
    def _servers_in_one_text(cls, servers: Any) -> Any:
        return ",".join(map(str, servers)) if isinstance(servers, list | tuple) else servers

    @field_validator("bootstrap_servers")
    @classmethod
    def _servers_have_ports(cls, servers: str) -> str:
        for server in servers.split(","):
            if not re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\]):\d+", server.strip()):
                raise ValueError(
                    "must be host:port, or several separated by commas, without scheme, user and password. Put these "
                    "into security_protocol, sasl_username and sasl_password"
                )
        return servers

    @field_validator("ssl_ca_location", "ssl_certificate_location", "ssl_key_location")
    @classmethod
    def _is_a_file(cls, file: str | None) -> str | None:
        if file and "-----BEGIN" in file:
            raise ValueError(
                "must be the path of a file, not its content. Put a key itself into client_options, as ssl.key.pem"
            )
        return file

    @field_validator("offset_reset_policy")
    @classmethod
    def _begins_somewhere(cls, policy: str) -> str:
        _since(policy)
        return policy

    @field_validator("client_options")
    @classmethod
    def _leaves_what_is_owned(cls, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if name in OWNED:
                raise ValueError(f"{name!r} belongs to this connector: {OWNED[name]}. Leave it out")
        return options

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if bool(self.topics) == bool(self.topic_pattern):
            raise ValueError(f"topics is {list(self.topics)} and topic_pattern {self.topic_pattern!r}: set one of them")
        try:
            re.compile(self.topic_pattern or "")
        except re.error as error:
            raise ValueError(f"topic_pattern {self.topic_pattern!r} is no regular expression: {error}") from None
        for kind, protocols in (("sasl", "SASL_PLAINTEXT or SASL_SSL"), ("ssl", "SSL or SASL_SSL")):
            given = [one for one in type(self).model_fields if one.startswith(f"{kind}_") and getattr(self, one)]
            if given and self.security_protocol not in protocols.split(" or "):
                raise ValueError(
                    f"{given[0]} is set, but security_protocol is {self.security_protocol}, which has no use for it: "
                    f"set {protocols}"
                )
        if self.security_protocol.startswith("SASL") and self.sasl_mechanism is None:
            raise ValueError(f"security_protocol is {self.security_protocol}: set sasl_mechanism, too")
        if self.fetch_max_wait_s + 1 > self.request_timeout_s:
            raise ValueError(
                f"fetch_max_wait_s is {self.fetch_max_wait_s:g} and request_timeout_s {self.request_timeout_s:g}: "
                "brokers would be given up while they wait. Let the second be larger by 1 at least"
            )
        return self

    @property
    def places(self) -> frozenset[str]:
        """Each topic at each broker, or the pattern, of the consumer group: other groups get messages of their own."""
        servers = [server.strip().rpartition(":") for server in self.bootstrap_servers.split(",")]
        topics = self.topics or (str(self.topic_pattern),)
        return frozenset(
            f"topic {topic!r} in group {self.group_id!r} at {host(name)}:{port}"
            for name, _, port in servers
            for topic in topics
        )

    @property
    def since_ms(self) -> int | None:
        """The time that reading begins at, in milliseconds since the epoch, where offset_reset_policy names one."""
        return _since(self.offset_reset_policy)

    @property
    def default_topic(self) -> str | None:
        """Where a message goes that names no topic; None where several are read."""
        return self.topics[0] if len(self.topics) == 1 else None

    def settings(self, **more: str | int | bool) -> dict[str, Any]:
        """What any client gets, in the client library's words; `more` with underscores for dots."""
        given = {
            **{option.replace("_", "."): getattr(self, option) for option in _PASSED},
            "socket.timeout.ms": round(self.request_timeout_s * 1_000),
            "reconnect.backoff.max.ms": 1_000,
            **{name.replace("_", "."): value for name, value in more.items()},
            **self.client_options,
        }
        return {name: value for name, value in given.items() if value is not None}

    def to_read(self) -> dict[str, Any]:
        """What a client that reads gets."""
        return self.settings(
            group_id=self.group_id,
            isolation_level=self.isolation_level,
            fetch_min_bytes=self.fetch_min_bytes,
            fetch_max_bytes=self.fetch_max_bytes,
            fetch_wait_max_ms=round(self.fetch_max_wait_s * 1_000),
            receive_message_max_bytes=LARGEST,  # or a message above 100 MB would be asked for again for ever
            enable_auto_commit=False,
            enable_partition_eof=True,
            auto_offset_reset="error",
            **AT_ONCE,
        )

    def to_send(self) -> dict[str, Any]:
        """What a client that sends gets."""
        return self.settings(
            acks="all",
            enable_idempotence=True,
            message_timeout_ms=round(self.request_timeout_s * 1_000),
            # Less than that, or a topic that is not there would seem to be a broker that does not answer.
            topic_metadata_propagation_max_ms=round(self.request_timeout_s * 500),
            message_max_bytes=1_000_000_000,  # what is too large, the broker says
        )


def _since(policy: str) -> int | None:
    """Read an offset_reset_policy; a `ValueError` if it is none."""
    if policy in ("earliest", "latest"):
        return None
    word, _, text = policy.partition(":")
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if word != "timestamp" or time is None or time.tzinfo is None:
        raise ValueError(
            "is earliest, latest or timestamp: and a time with its zone, as in timestamp:2026-01-31T00:00:00Z; got "
            f"{policy!r}"
        )
    return round(time.timestamp() * 1_000)
