"""Clients of AWS, and codes of their errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

from pipeline_platform.source.contract import SourceError

NO_CREDENTIALS = (
    ".*Credential.*|ProfileNotFound|.*(SSO|Token).*|InvalidAccessKeyId|InvalidClientTokenId|SignatureDoesNotMatch"
    "|InvalidSecurity|UnrecognizedClientException|AuthFailure|RequestExpired|LoginRefreshRequired"
)
AWAY = ".*Connect.*|.*Timeout.*|SSLError|ProxyConnectionError|HTTPClientError|ConnectionClosedError"
BUSY = ".*Throttl.*|RequestLimitExceeded|TooManyRequests.*|ServiceUnavailable.*|Internal(Error|Failure|ServerError)"

_EXPLANATIONS = {
    "NoRegionError|InvalidRegionError": "region_name is {region}, and {what} contains no region. Set region_name or "
    "AWS_DEFAULT_REGION.",
    # AWS's text about rejected credentials is left out: it may quote them.
    NO_CREDENTIALS: "no valid credentials for {what} ({code}; profile_name {profile}). Provide some by the environment "
    "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a profile or a role, or renew them.",
    AWAY: "endpoint_url ({endpoint}) does not answer for {what}: {text}. Correct it, or check the network or server.",
}
"""Descriptions of errors of every service, by patterns of their codes."""


def code_of(error: BaseException | None) -> str:
    """Return AWS's code of an error without its prefix, or the class of another error."""
    response = getattr(error, "response", None) or {}  # None for a closed connection
    code = str(response.get("Error", {}).get("Code", ""))
    return code.rsplit(".", 1)[-1] or type(error).__name__


def aws_client(service: str, source: Any, region: str | None, connections: int, *, read_timeout_s: int) -> Any:
    """Return a client of a service with the profile and the URL of a source, and timeouts that fit into a tick."""
    from botocore.config import Config  # here: the code server loads this file and needs no client
    from botocore.session import Session

    session = Session(profile=source.profile_name)
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 4},
        max_pool_connections=connections,
        # A sensor's tick has 60 s in all; four attempts with the default timeouts of 60 s would exceed it.
        connect_timeout=4,
        read_timeout=read_timeout_s,
    )
    return session.create_client(service, region_name=region, endpoint_url=source.endpoint_url, config=config)


def explained(
    error: Exception, source: Any, client: Any, what: str, explanations: Mapping[str, str], away: str = BUSY
) -> SourceError:
    """Return an error that names the option of a source at fault and the fix, without credentials.

    Args:
        error: Error of a call, or of the creation of the client.
        source: The source.
        client: Client of the source, or None if it could not be created.
        what: Option that names the queue or stream, with its value.
        explanations: Descriptions of errors of the service, by patterns of their codes.
        away: Pattern of further codes after which a call is retried. Codes of an unavailable service always are.
    """
    code = code_of(error)
    patterns = {**explanations, **_EXPLANATIONS}
    found = (explanation for codes, explanation in patterns.items() if re.fullmatch(codes, code))
    explanation = next(found, "{what} failed with {text}").format(
        what=what,
        endpoint=source.endpoint_url or (f"unset, so {client.meta.endpoint_url}" if client else "unset"),
        region=source.region_name or "unset",
        profile=source.profile_name or "unset",
        code=code,
        text=f"{type(error).__name__}: {error}",
    )
    described: SourceError = source.error(explanation, away=bool(re.fullmatch(f"{AWAY}|{away}", code)))
    return described


@cache
def _descriptions(folders: str | None) -> Any:
    """Return the loader of AWS's service descriptions, cached: loading takes 60 of the 65 ms of creating a client."""
    from botocore.loaders import create_loader

    return create_loader(folders)


def checked_url(url: str) -> str:
    """Return the URL of a server or queue; raise `ValueError` if it is not valid, or contains credentials."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        right = False
    if not right:
        raise ValueError("must be a URL that starts with http:// or https://, such as https://host:port/path.")
    if "@" in url or parts.query or parts.fragment:
        raise ValueError(
            "must not contain a user, password, query or fragment. Remove them: AWS clients find credentials in "
            "the environment, a profile or a role."
        )
    return url


Url = Annotated[str, AfterValidator(checked_url)]
"""URL of a server or queue, without credentials."""
