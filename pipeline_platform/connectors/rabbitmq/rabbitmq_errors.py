"""What an error of an AMQP server or of the way to it means: which option is to blame, and what to do."""

import re
from urllib.parse import unquote, urlsplit

from pipeline_platform.connectors.rabbitmq.rabbitmq_options import RabbitmqOptions
from pipeline_platform.source.contract import SourceAwayError, SourceError


def explained(error: BaseException, source: RabbitmqOptions) -> SourceError:
    """Say what to do about an error of pika, a socket or TLS; never what the password is."""
    address = urlsplit(source.url)
    host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    code = str(getattr(error, "reply_code", type(error).__name__))
    text = f"{code} {str(getattr(error, 'reply_text', error)) or 'no reason given'}"
    found = (way_out for pattern, way_out in _EXPLANATIONS.items() if re.search(pattern, text, re.IGNORECASE))
    way_out = next(found).format(
        queue=source.queue,
        server=f"{host}:{address.port or (5671 if address.scheme == 'amqps' else 5672)}",
        user=unquote(address.username or "guest"),
        vhost=unquote(address.path.removeprefix("/")) or "/",
        text=text,
    )
    kind = SourceAwayError if re.search(_AWAY, text) else SourceError
    return kind(f"source {source.name!r}: {way_out}")


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
