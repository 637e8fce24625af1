"""Text for errors, logs and terminals: URLs without credentials, messages without secrets, no control characters."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pydantic import SecretStr

HIDDEN = "***"
"""Replaces a secret."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_SECRET_NAME = re.compile(r"pass|secret|token|credential|signature|pem|key|config$", re.IGNORECASE)
"""Pattern of the names of parameters and options whose values are secrets."""
_USER_INFO = re.compile(r"(?<=://)[^\s'\"]*@")
_SHORT = 8
"""A shorter secret may be part of a word by chance, so it is replaced only as a word of its own."""


def address(url: str) -> str:
    """Return a URL without user, password, query and fragment.

    Text that is not a URL is hidden: it may be a secret in the wrong option. If the URL is ambiguous, everything after
    its scheme is hidden.
    """
    scheme, mark, rest = url.partition("://")
    if not mark or not _SCHEME.fullmatch(scheme):
        return HIDDEN
    return f"{scheme}://{HIDDEN if is_ambiguous(url) else re.split('[?#]', rest.rpartition('@')[2], maxsplit=1)[0]}"


def is_ambiguous(url: str) -> bool:
    """Whether a URL has an `@` in its password or after its host, so that the end of the password is not certain."""
    rest = url.partition("://")[2]
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    return "@" in rest[len(host) :] or host.count("@") > 1


def secrets_in(value: Any, name: str = "password") -> Iterator[str]:
    """Yield the secrets in the value of an option.

    Args:
        value: Text; a URL, whose secrets are its password and parameters such as `sslpassword`; or a mapping, whose
            secrets are the values with a name such as `sasl.oauthbearer.client.secret`.
        name: Name of the option or parameter. Text is a secret if the name is one of a secret.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from secrets_in(each, str(key))
    elif isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, str) and "://" in value:
        yield from _secrets_of_url(value)
    elif isinstance(value, str) and value and _SECRET_NAME.search(name):
        yield value


def _secrets_of_url(url: str) -> Iterator[str]:
    user_info, mark, rest = url.partition("://")[2].rpartition("@")
    if mark and (password := user_info.partition(":")[2]):
        yield password
    try:
        query = urlsplit(f"//{rest}").query
    except ValueError:  # a host in brackets that is not an IPv6 address
        query = rest.partition("?")[2]
    for name, value in parse_qsl(query):
        yield from secrets_in(value, name)


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace the user part of each URL, and each secret: plain, percent-encoded, decoded or as in its `repr`."""
    text = _USER_INFO.sub(f"{HIDDEN}@", text)
    forms = {
        form
        for secret in secrets
        for form in (secret, unquote(secret), quote(secret, safe=""), quote(secret), repr(secret)[1:-1])
    }
    for form in sorted(filter(None, forms), key=len, reverse=True):
        pattern = re.escape(form)
        text = re.sub(pattern if len(form) >= _SHORT else rf"(?<!\w){pattern}(?!\w)", HIDDEN, text)
    return text


def printable(text: str, keep: str = "") -> str:
    r"""Escape unprintable characters, so that text of users and messages cannot control a terminal or forge a line.

    Args:
        text: May contain escape sequences, line ends, marks that reverse the direction of text, lone surrogates.
        keep: Characters to keep, such as `\n` in text of the platform.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
