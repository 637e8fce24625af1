"""A schema registry with Confluent's API, for payloads in Confluent's wire format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from pipeline_platform.model.failure import RunError
from pipeline_platform.model.safe_text import address, redacted, secrets_in
from pipeline_platform.source.patience import USUAL, patiently
from pipeline_platform.tasks.callback_process.progress import without_time_limit

T = TypeVar("T")

DEFAULTS: Mapping[str, Any] = {"timeout": 10, "max.retries": 0}
"""Settings of Confluent's client, which by default has no timeout. The platform retries instead of the client."""
_BUSY = (408, 425, 429)
"""Statuses of HTTP after which a request is worth a retry, in addition to those of 500 and above."""


class UnknownSchemaError(LookupError):
    """The registry has no schema with the id of a payload. The message fails; a retry may succeed."""


class SchemaRegistryError(RunError):
    """The registry cannot be used. The message contains its address and the fix."""


class SchemaRegistryAwayError(SchemaRegistryError):
    """The registry is unavailable, or did not become available in time."""


class SchemaRegistry:
    """A schema registry. Create it in `__init__` of a pipeline: each callback process then has its own connection.

    Each schema is requested once. While the registry is unavailable, the callback waits up to 30 s, without a time
    limit. Then its run fails, no message fails, and a later run handles the messages.

    Args:
        settings: Settings of Confluent's `SchemaRegistryClient`, such as `url` and `basic.auth.user.info`; or such a
            client. `timeout` is 10 s by default.

    Raises:
        ValueError: A setting is not valid.
    """

    def __init__(self, settings: Mapping[str, Any] | Any) -> None:
        self._lock, self._schemas = Lock(), dict[Any, Any]()
        self._refused: SchemaRegistryError | None = None
        self._where, self._secrets = "", list[str]()
        if not isinstance(settings, Mapping):
            self._client = settings
            return
        from confluent_kafka.schema_registry import SchemaRegistryClient  # late: an optional dependency

        urls = str(settings.get("url", "")).split(",")
        self._where, self._secrets = f" {', '.join(map(address, urls))}", list(secrets_in(settings))
        if login := settings.get("basic.auth.user.info"):
            self._secrets.append(str(login).partition(":")[2])
        self._client = SchemaRegistryClient({**DEFAULTS, **settings})

    def schema(self, schema_id: int, form: str | None = None) -> Any:
        """Return a schema.

        Args:
            schema_id: Its id.
            form: Format of its text, such as `serialized` for a Protobuf schema.

        Raises:
            UnknownSchemaError: The registry has no such schema.
            SchemaRegistryError: The registry cannot be used.
        """
        what = f"schema {schema_id}"
        return self._known((schema_id, form), what, lambda: self._client.get_schema(schema_id, fmt=form))

    def referenced(self, reference: Any) -> Any:
        """Return the schema to which a reference of a schema leads; raise the same errors."""
        subject, version = reference.subject, reference.version
        what = f"version {version} of {subject}"
        return self._known(
            (subject, version), what, lambda: self._client.get_version(subject, version, deleted=True).schema
        )

    def _known(self, key: Any, what: str, request: Callable[[], Any]) -> Any:
        with without_time_limit(), self._lock:  # one request of all threads
            if self._refused is not None:  # other threads do not wait again
                raise self._refused
            if key not in self._schemas:
                try:
                    self._schemas[key] = patiently(
                        partial(self._answered, what, request), USUAL, SchemaRegistryAwayError
                    )
                except UnknownSchemaError as error:
                    self._schemas[key] = error
                except SchemaRegistryError as error:
                    self._refused = error
                    raise
            found = self._schemas[key]
        if isinstance(found, UnknownSchemaError):
            raise UnknownSchemaError(*found.args)
        return found

    def _answered(self, what: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except Exception as error:
            status, code = getattr(error, "http_status_code", None), getattr(error, "error_code", None) or 0
            if status == 404 and 40_400 <= code < 40_500:
                raise UnknownSchemaError(f"{what} is not in the schema registry{self._where}") from None
            name = f"schema registry{self._where}"
            why = redacted(f"{type(error).__name__}: {error}", self._secrets)
            if status is None or status >= 500 or status in _BUSY:
                fix = "Check the url, the network and the registry."
                raise SchemaRegistryAwayError(f"{name}: does not answer: {why}. {fix}") from None
            if status in (401, 403):
                fix = "Correct basic.auth.user.info, or the other settings of the login."
                raise SchemaRegistryError(f"{name}: refused this client: {why}. {fix}") from None
            raise SchemaRegistryError(f"{name}: cannot return {what}: {why}. Correct the url.") from None

    def __repr__(self) -> str:
        """Return the address, without credentials."""
        return f"SchemaRegistry({self._where.strip()})"
