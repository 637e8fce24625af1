"""Options of a Kafka source, their validation, and the settings of its clients."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipeline_platform.source.log import LogSource
from pipeline_platform.source.options import host, time_of_start

_STARTS = ("earliest", "latest"), "timestamp"
_TOPIC = r"[a-zA-Z0-9._-]{1,249}"
_AT_ONCE = {"fetch_queue_backoff_ms": 2, "queued_min_messages": 20_000, "queued_max_messages_kbytes": 32_768}
"""Defaults that `client_options` may override.

The client library's own defaults queue five times as many messages, the last of which are discarded at the end of a
range, and pause for 1 s whenever the queue is full, which took half of the time of reading.
"""
LARGEST = 2_147_483_647
"""Maximum bytes of a response that a client accepts: the client library's own maximum."""

_PASSED = (
    "bootstrap_servers", "client_id", "security_protocol", "sasl_mechanism", "sasl_username", "sasl_password",
    "ssl_ca_location", "ssl_certificate_location", "ssl_key_location", "ssl_key_password",
)  # fmt: skip
"""Options passed to every client unchanged: the client library uses the same names, with dots for underscores."""
_OWNED_FOR = {
    "offsets are committed after all earlier messages are acknowledged": "auto.commit.enable enable.auto.commit "
    "enable.auto.offset.store",
    "missing offsets are an error and are never skipped": "auto.offset.reset",
    "send() returns only when messages are replicated": "acks request.required.acks",
    "send() sends no message twice": "enable.idempotence",
    "send() uses no transactions": "transactional.id",
    "it marks the end of a range whose last offsets are gaps": "enable.partition.eof",
    "the source never joins the group": "group.instance.id group.protocol partition.assignment.strategy",
    "set bootstrap_servers": "metadata.broker.list",
    "set fetch_max_wait_s": "fetch.wait.max.ms",
    "set request_timeout_s": "socket.timeout.ms",
    "set sasl_mechanism": "sasl.mechanisms",
}
OWNED = {name: why for why, names in _OWNED_FOR.items() for name in names.split()} | {
    option.replace("_", "."): f"set {option}"
    for option in (*_PASSED, "fetch_max_bytes", "fetch_min_bytes", "group_id", "isolation_level")
}
"""Options of the client library that this connector sets itself, each with the reason or the option to set instead."""


class KafkaOptions(LogSource):
    """Options of a Kafka source."""

    bootstrap_servers: str = Field(description="Initial brokers: host:port, separated by commas, or a list.")
    group_id: str = Field(min_length=1, description="Consumer group that stores the committed offsets.")
    topics: tuple[Annotated[str, Field(pattern=rf"^{_TOPIC}$")], ...] = Field((), description="Topics to read.")
    topic_pattern: str | None = Field(
        None,
        description="Regular expression, instead of topics: reads every topic whose whole name matches, also topics "
        "that are created later.",
    )
    offset_reset_policy: str = Field(
        "earliest",
        description="Where reading starts if the group has no committed offset: earliest, latest, or timestamp:<ISO "
        "8601 with a time zone>, as in timestamp:2026-01-31T00:00:00Z. Partitions added to a topic later are read from "
        "their start.",
    )
    isolation_level: Literal["read_committed", "read_uncommitted"] = Field(
        "read_committed", description="read_committed skips messages of open and aborted transactions."
    )
    fetch_min_bytes: int = Field(1, ge=1, description="Minimum bytes that a broker collects before it answers a fetch.")
    fetch_max_bytes: int = Field(
        52_428_800,
        ge=1_000_000,
        le=LARGEST - 512,
        description="Maximum bytes of a broker's answer to a fetch; a larger message is returned alone.",
    )
    fetch_max_wait_s: float = Field(
        0.5, ge=0, le=300, description="Maximum seconds that a broker waits for fetch_min_bytes."
    )
    request_timeout_s: float = Field(10.0, ge=2, le=300, description="Timeout of a request to a broker, in seconds.")
    client_id: str = Field("pipeline-platform", description="Name of this client in the brokers' logs and quotas.")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="Protocol of the connection to brokers."
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI"] | None = Field(
        None, description="Login mechanism, with security_protocol SASL_PLAINTEXT or SASL_SSL."
    )
    sasl_username: str | None = Field(None, description="User name for the login.")
    sasl_password: str | None = Field(None, repr=False, description="Password for the login.")
    ssl_ca_location: str | None = Field(None, description="File of the CA certificates that verify brokers.")
    ssl_certificate_location: str | None = Field(None, description="File of this client's certificate.")
    ssl_key_location: str | None = Field(None, description="File of this client's private key.")
    ssl_key_password: str | None = Field(None, repr=False, description="Password of the private key.")
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
                    "must be host:port, or several separated by commas, without scheme, user and password. Set these "
                    "with security_protocol, sasl_username and sasl_password."
                )
        return servers

    @field_validator("ssl_ca_location", "ssl_certificate_location", "ssl_key_location")
    @classmethod
    def _is_a_file(cls, file: str | None) -> str | None:
        if file and "-----BEGIN" in file:
            raise ValueError(
                "must be the path of a file, not its content. Write the content to a file, or set ssl.key.pem in "
                "client_options."
            )
        return file

    @field_validator("offset_reset_policy")
    @classmethod
    def _begins_somewhere(cls, policy: str) -> str:
        time_of_start(policy, *_STARTS)
        return policy

    @field_validator("client_options")
    @classmethod
    def _leaves_what_is_owned(cls, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if name in OWNED:
                raise ValueError(f"{name!r} is set by this connector: {OWNED[name]}. Remove it.")
        return options

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if bool(self.topics) == bool(self.topic_pattern):
            raise ValueError(
                f"exactly one of topics and topic_pattern must be set, got {list(self.topics)} and "
                f"{self.topic_pattern!r}. Set one of them."
            )
        try:
            re.compile(self.topic_pattern or "")
        except re.error as error:
            raise ValueError(
                f"topic_pattern {self.topic_pattern!r} is not a valid regular expression: {error}. Correct it."
            ) from None
        for kind, protocols in (("sasl", "SASL_PLAINTEXT or SASL_SSL"), ("ssl", "SSL or SASL_SSL")):
            given = [
                option for option in type(self).model_fields if option.startswith(f"{kind}_") and getattr(self, option)
            ]
            if given and self.security_protocol not in protocols.split(" or "):
                raise ValueError(
                    f"{given[0]} is set, but security_protocol {self.security_protocol} does not use it. Set "
                    f"security_protocol to {protocols}, or remove {given[0]}."
                )
        if self.security_protocol.startswith("SASL") and self.sasl_mechanism is None:
            raise ValueError(f"security_protocol {self.security_protocol} requires sasl_mechanism, got None. Set it.")
        if self.fetch_max_wait_s + 1 > self.request_timeout_s:
            raise ValueError(
                f"request_timeout_s must exceed fetch_max_wait_s by at least 1, got {self.request_timeout_s:g} and "
                f"{self.fetch_max_wait_s:g}. Raise request_timeout_s: a fetch would time out while the broker waits."
            )
        return self

    @property
    def places(self) -> frozenset[str]:
        """Each topic at each broker, or the pattern, with the consumer group: other groups get their own messages."""
        servers = [server.strip().rpartition(":") for server in self.bootstrap_servers.split(",")]
        topics = self.topics or (str(self.topic_pattern),)
        return frozenset(
            f"topic {topic!r} in group {self.group_id!r} at {host(name)}:{port}"
            for name, _, port in servers
            for topic in topics
        )

    @property
    def since_ms(self) -> int | None:
        """Time of the policy `timestamp:...` in milliseconds since the epoch; None for another policy."""
        since = time_of_start(self.offset_reset_policy, *_STARTS)
        return since if since is None else round(since * 1_000)

    @property
    def default_topic(self) -> str | None:
        """Topic of a message that names none; None if the source reads several."""
        return self.topics[0] if len(self.topics) == 1 else None

    def settings(self, **more: str | int | bool) -> dict[str, Any]:
        """Return the settings of every client, by the client library's names; `more` with underscores for dots."""
        given = {
            **{option.replace("_", "."): getattr(self, option) for option in _PASSED},
            "socket.timeout.ms": round(self.request_timeout_s * 1_000),
            "reconnect.backoff.max.ms": 1_000,
            **{name.replace("_", "."): value for name, value in more.items()},
            **self.client_options,
        }
        return {name: value for name, value in given.items() if value is not None}

    def to_read(self) -> dict[str, Any]:
        """Return the settings of a consumer."""
        return self.settings(
            group_id=self.group_id,
            isolation_level=self.isolation_level,
            fetch_min_bytes=self.fetch_min_bytes,
            fetch_max_bytes=self.fetch_max_bytes,
            fetch_wait_max_ms=round(self.fetch_max_wait_s * 1_000),
            receive_message_max_bytes=LARGEST,  # otherwise a message above 100 MB is requested in an endless loop
            enable_auto_commit=False,
            enable_partition_eof=True,
            auto_offset_reset="error",
            **_AT_ONCE,
        )

    def to_send(self) -> dict[str, Any]:
        """Return the settings of a producer."""
        return self.settings(
            acks="all",
            enable_idempotence=True,
            message_timeout_ms=round(self.request_timeout_s * 1_000),
            # Shorter than message_timeout_ms: otherwise a missing topic is reported as a broker that does not answer.
            topic_metadata_propagation_max_ms=round(self.request_timeout_s * 500),
            message_max_bytes=1_000_000_000,  # the broker applies its own limit
        )
