"""Clients of Google Cloud APIs, their retries, and explanations of their errors."""

import re
from typing import Any

from pipeline_platform.source.contract import Source, SourceError

_AWAY = "ServiceUnavailable|DeadlineExceeded|Cancelled|Aborted|Unknown|InternalServerError|TransportError"
_UNSIGNED = "NoToken"
_QUOTA = "ResourceExhausted"
_EXPLANATIONS = {
    "NotFound": "{what} does not exist ({place}). Create it, or correct the option that is wrong.",
    "PermissionDenied": "permission denied for {what}: {text}. Grant roles/pubsub.subscriber on a subscription, "
    "roles/pubsub.publisher on the topic of send().",
    # Google's text about rejected credentials is left out: it may quote them.
    f"Unauthenticated|{_UNSIGNED}|.*Credential.*|RefreshError|MalformedError|InvalidValue": "no valid credentials for "
    "{what} ({code}; {credentials}). Set credentials_file or GOOGLE_APPLICATION_CREDENTIALS, or renew the credentials.",
    _AWAY: "{place} does not answer for {what}: {text}. Correct it, or check the network or server.",
    _QUOTA: "quota exceeded for {what}: {text}. Request a higher quota, or lower producer.concurrency.",
}
"""Descriptions of errors, by patterns of their class names."""


def connected(service: Any, emulator: str | None, **options: str | None) -> Any:
    """Return a client of a service's class with the options that are set: Google's, or of an emulator's `host:port`."""
    import grpc

    if not emulator:
        return service(client_options={name: value for name, value in options.items() if value})
    # The library's own support for emulators rejects replies of more than 4 MB.
    channel = grpc.insecure_channel(emulator, options=[("grpc.max_receive_message_length", -1)])
    return service(transport=service.get_transport_class("grpc")(channel=channel))


def tries(within_s: float) -> Any:
    """Return a policy that retries transient errors for up to `within_s` seconds."""
    from google.api_core import exceptions, retry

    passing = retry.if_exception_type(exceptions.Aborted, exceptions.ServiceUnavailable, exceptions.Unknown)
    return retry.Retry(predicate=passing, initial=0.1, maximum=2.0, timeout=within_s)


def last(error: BaseException | None) -> BaseException | None:
    """Return the error of the last of several attempts."""
    return getattr(error, "cause", None) or error


def code(error: BaseException | None) -> str:
    """Return Google's name of an error: its class."""
    return _UNSIGNED if "metadata from plugin failed" in str(error) else type(error).__name__


def explained(error: BaseException | None, source: Source, what: str, place: str, credentials: str) -> SourceError:
    """Return an error about `what`, with the options `place` and `credentials` that may be at fault."""
    name = code(error)
    found = (explanation for names, explanation in _EXPLANATIONS.items() if re.fullmatch(names, name))
    explanation, text = next(found, "{what} failed: {text}"), f"{name}: {error}"
    described = explanation.format(what=what, place=place, credentials=credentials, code=name, text=text)
    return source.error(described, away=bool(re.fullmatch(f"{_AWAY}|{_UNSIGNED}|{_QUOTA}", name)))
