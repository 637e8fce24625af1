"""Google Cloud APIs: clients of them, what is tried again, and what to do about their errors."""

import re
from typing import Any

from pipeline_platform.model.safe_text import redacted
from pipeline_platform.source.contract import SourceAwayError, SourceError

_AWAY = "ServiceUnavailable|DeadlineExceeded|Cancelled|Aborted|Unknown|InternalServerError|TransportError"
_UNSIGNED = "NoToken"
_QUOTA = "ResourceExhausted"
_EXPLANATIONS = {
    "NotFound": "{what} is not there ({place}). Create it, or correct the option that is wrong",
    "PermissionDenied": "not allowed on {what}: {text}. Grant roles/pubsub.subscriber on a subscription, "
    "roles/pubsub.publisher on the topic of send()",
    # What Google says of refused credentials is left out: it may quote them.
    f"Unauthenticated|{_UNSIGNED}|.*Credential.*|RefreshError|MalformedError|InvalidValue": "no valid credentials for "
    "{what} ({code}; {credentials}). Set credentials_file or GOOGLE_APPLICATION_CREDENTIALS, or renew what is there",
    _AWAY: "{place} does not answer for {what}: {text}. Correct it, or see to the network or server",
    _QUOTA: "a quota is used up for {what}: {text}. Have it raised, or lower producer.concurrency",
}
"""By the class of an error."""


def connected(service: Any, emulator: str | None, **options: str | None) -> Any:
    """Make a client of a service's class: Google's, by the options that are set, or of an emulator's `host:port`."""
    import grpc

    if not emulator:
        return service(client_options={name: value for name, value in options.items() if value})
    # By the library's own way to an emulator, a reply of more than 4 MB is an error.
    channel = grpc.insecure_channel(emulator, options=[("grpc.max_receive_message_length", -1)])
    return service(transport=service.get_transport_class("grpc")(channel=channel))


def tries(within_s: float) -> Any:
    """Try a call again that failed for a while, for so many seconds in all."""
    from google.api_core import exceptions, retry

    passing = retry.if_exception_type(exceptions.Aborted, exceptions.ServiceUnavailable, exceptions.Unknown)
    return retry.Retry(predicate=passing, initial=0.1, maximum=2.0, timeout=within_s)


def last(error: BaseException | None) -> BaseException | None:
    """What the last of several tries raised."""
    return getattr(error, "cause", None) or error


def code(error: BaseException | None) -> str:
    """What Google calls an error: its class."""
    return _UNSIGNED if "metadata from plugin failed" in str(error) else type(error).__name__


def explained(error: BaseException | None, source: str, what: str, place: str, credentials: str) -> SourceError:
    """Put an error about `what` into words; `place` and `credentials` are options that may be to blame."""
    name = code(error)
    found = (way_out for names, way_out in _EXPLANATIONS.items() if re.fullmatch(names, name))
    way_out, text = next(found, "{what} failed: {text}"), f"{name}: {error}"
    kind = SourceAwayError if re.fullmatch(f"{_AWAY}|{_UNSIGNED}|{_QUOTA}", name) else SourceError
    said = way_out.format(what=what, place=place, credentials=credentials, code=name, text=text)
    return kind(redacted(f"source {source!r}: {said}"))
