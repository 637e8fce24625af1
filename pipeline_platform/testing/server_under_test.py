"""What the author of a connector says of its server to `check_source`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline_platform.source.contract import Source

FEWEST = 10
"""Payloads without which half of them, divided among tasks, would show nothing."""

TEXTS = (
    b"plain",
    "Zoë → 東京".encode(),
    b'{"a": "\\u0000", "b": [1.50, 1e400]}',
    b" \t spaces, and a line's end\r\n",
    *(b'{"n": %d}' % n for n in range(20)),
)
"""Payloads for servers that carry text alone, and none that is empty."""

PAYLOADS = (*TEXTS, b"", b"\x00\xff\xfe are no UTF-8")
"""Payloads for servers that carry any bytes."""


PAGES = tuple(b"message %d of many" % number for number in range(2_500))
"""So many that they take several calls of most servers."""


@dataclass(frozen=True)
class Server:
    """What only the author of a connector knows. All of it may be left out.

    Attributes:
        payloads: What is sent to a new queue, no two of them equal. `TEXTS` where the server carries text alone.
        send: Puts payloads into the queue of a source that has no `send()`. Without either, a new source holds
            `payloads` from the beginning.
        many: What is sent where a source has to make several calls for it, no two equal: more than two pages of its
            server, or of its own. Empty to leave that out.
        missing: Builds a source whose queue is not there.
        away: Takes a source, and returns it with an address at which no server answers.
        cut: Cuts the connections that a source has open, as a network does.
        says_lost: Whether the server refuses to acknowledge what another receive holds. If not, `acknowledge` cannot
            report it.
        sleep: Lets seconds pass, until leases and delays are over. A server with a clock to turn turns it.
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
        """Refuse payloads that could not be told from each other."""
        if len(set(self.payloads)) < max(FEWEST, len(self.payloads)):
            raise ValueError(f"payloads has {len(self.payloads)}: give {FEWEST} or more, no two of them equal")
        if len(set(self.many)) < len(self.many):
            raise ValueError(f"many has {len(self.many)}: no two of them may be equal")

    def sender(self, source: Source) -> Callable[[Sequence[bytes]], object] | None:
        """What puts payloads into a source's queue; None where nothing does."""
        send = self.send
        if send is not None:
            return lambda payloads: send(source, payloads)
        return None if type(source).send is Source.send else source.send
