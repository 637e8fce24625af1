"""Description of a server for `check_source`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline_platform.source.contract import Source

FEWEST = 10
"""Least number of payloads: half of them are divided among tasks."""

TEXTS = (
    b"plain",
    "Zoë → 東京".encode(),
    b'{"a": "\\u0000", "b": [1.50, 1e400]}',
    b" \t spaces, and a line's end\r\n",
    *(b'{"n": %d}' % n for n in range(20)),
)
"""Payloads for servers that accept only text that is not empty."""

PAYLOADS = (*TEXTS, b"", b"\x00\xff\xfe are not UTF-8")
"""Payloads for servers that accept any bytes."""


PAGES = tuple(b"message %d of many" % number for number in range(2_500))
"""Payloads for several calls of most servers."""


@dataclass(frozen=True)
class Server:
    """Properties of a server that `check_source` cannot find out. All are optional.

    Attributes:
        payloads: Payloads for a new queue, all different. Use `TEXTS` if the server accepts text only.
        send: Function that sends payloads to the queue of a source without `send()`. Without both, a new source must
            contain `payloads` from the start.
        many: Payloads, all different, that need several calls: more than two pages of the server or the source. Empty
            to skip their promise.
        missing: Function that builds a source whose queue does not exist.
        away: Function that returns a source with an address at which no server answers.
        cut: Function that cuts the open connections of a source, like a network fault.
        says_lost: Whether the server refuses to acknowledge messages that another receive has leased. If not,
            `acknowledge` cannot report them.
        sleep: Function that waits for seconds, for leases and delays. A server with an adjustable clock advances it.
    """

    payloads: Sequence[bytes] = PAYLOADS
    send: Callable[[Source, Sequence[bytes]], object] | None = None
    many: Sequence[bytes] = PAGES
    missing: Callable[[], Source] | None = None
    away: Callable[[Source], Source] | None = None
    cut: Callable[[Source], object] | None = None
    says_lost: bool = True
    sleep: Callable[[float], object] = time.sleep

    def __post_init__(self) -> None:
        """Refuse equal payloads."""
        if (different := len(set(self.payloads))) < max(FEWEST, len(self.payloads)):
            raise ValueError(
                f"Server.payloads: must be {FEWEST} or more different payloads, got {different} different of "
                f"{len(self.payloads)}."
            )
        if (different := len(set(self.many))) < len(self.many):
            raise ValueError(f"Server.many: must be different payloads, got {different} different of {len(self.many)}.")

    def sender(self, source: Source) -> Callable[[Sequence[bytes]], object] | None:
        """Return a function that sends payloads to the queue of a source; None without one."""
        send = self.send
        if send is not None:
            return lambda payloads: send(source, payloads)
        return None if type(source).send is Source.send else source.send
