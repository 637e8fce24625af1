"""Trial of one promise of a source with a new queue: receives, acknowledgements and expectations."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pipeline_platform.source.contract import Refused, Share, Source
from pipeline_platform.testing import promises
from pipeline_platform.testing.promises import BrokenPromiseError, Check, Promise
from pipeline_platform.testing.server_under_test import Server

PROMISES: dict[str, Promise] = {}
"""All promises, by name."""

DELIVERS = (
    "nothing_is_lost", "payloads_are_untouched", "pickles_without_clients", "closing_unused_is_harmless",
)  # fmt: skip
"""Default prerequisites of promises."""


def promise(
    *,
    family: type[Any] = Source,
    builds_on: Sequence[str] = DELIVERS,
    messages: int | None = None,
    many: bool = False,
) -> Callable[[Check], Check]:
    """Register a function as the check of a promise; the first line of its docstring is the promise's sentence."""

    def register(check: Check) -> Check:
        PROMISES[check.__name__] = Promise.of(check, family, builds_on, messages, many)
        return check

    return register


MANY = 10_000
"""A demand larger than every backlog."""
SHOWN = 3
"""Payloads in an error."""
TRIES = 40
"""Most polls for an expected state."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Received:
    """Shares and deliveries of one receive."""

    source: Source
    receive_id: str
    shares: Sequence[Share]
    rows: list[Row] = field(default_factory=list)

    @property
    def data(self) -> list[bytes]:
        """Payloads of its deliveries."""
        return [row["data"] for row in self.rows]

    def held(self) -> list[tuple[str, list[str]]]:
        """Return the `ack_id`s by `ack_ref`, as a run records them."""
        groups: dict[str, list[str]] = {}
        for row in self.rows:
            groups.setdefault(row["ack_ref"], []).append(row["ack_id"])
        return list(groups.items())

    def part(self, rows: Iterable[Row]) -> Received:
        """Return the same receive with some of its messages."""
        return Received(self.source, self.receive_id, self.shares, list(rows))


class Trial(promises.Trial):
    """A new queue with the messages `sent`, and an open source of it.

    `lease_s` is the time after which a lease expires, None if it does not. `figures` are measured times in seconds.
    """

    def __init__(self, promise: Promise, build: Callable[[], Source], server: Server, folder: Path) -> None:
        self.source = build()
        super().__init__(promise, self.source)
        self.server = server
        self._numbers, self._folder, self._to_close, self._stores = count(1), folder, list[Source](), list[Any]()
        self.new_store()
        every_s = self.source.extend_every_s
        self.lease_s: float | None = getattr(self.source, "lease_s", every_s and 3 * every_s)
        self.sent = list(server.payloads)
        if (send := server.sender(self.source)) is not None:
            self.sent = list(server.many) if promise.many else self.sent[: promise.messages]
            send(self.sent)

    @property
    def has_abandon(self) -> bool:
        """Whether the source implements `abandon`."""
        return type(self.source).abandon is not Source.abandon

    @property
    def soon_s(self) -> float:
        """Seconds within which immediate deliveries arrive; no lease expires in this time."""
        return 2.0 if self.lease_s is None else self.lease_s / 2

    @property
    def patience_s(self) -> float:
        """Seconds within which deliveries arrive that wait until a lease expires."""
        return 5.0 if self.lease_s is None else 4 * self.lease_s

    def new_store(self) -> Source:
        """Open the source with a new control store, without stored positions, and return it."""
        from pipeline_platform.control.store import ControlStore

        self._store = ControlStore(f"sqlite:///{self._folder}/{len(self._stores)}.sqlite")
        self._stores.append(self._store)
        return self.opened(self.source)

    def another(self) -> Source:
        """Return the source as in another process."""
        copy: Source = pickle.loads(pickle.dumps(self.source))  # noqa: S301 - our own
        return self.opened(copy)

    def close(self) -> None:
        """Close all opened sources and stores."""
        for source in self._to_close:
            source.close()
        for store in self._stores:
            store.close()

    def check(self) -> None:
        """Check the promise."""
        is_possible = self.sent or not isinstance(self.source, self.promise.family)
        self.need(is_possible, "its server has no payloads for it (many)")
        super().check()

    def receive(self, *, by: Source | None = None, demand: int = MANY) -> Received:
        """Plan for two tasks and read, as a run does."""
        source, receive_id = by or self.source, f"receive-{next(self._numbers)}"
        shares = source.plan(demand, 2, receive_id)
        rows = [row for share in shares for batch in source.read(share, receive_id) for row in batch.to_pylist()]
        return Received(source, receive_id, shares, rows)

    def first(self, *, demand: int = MANY) -> Received:
        """Receive at least one message."""
        for _ in self._looks(self.soon_s):
            received = self.receive(demand=demand)
            if received.rows:
                return received
        raise BrokenPromiseError(self.promise, "one of the waiting messages", "no message")

    def come(
        self, wanted: Collection[bytes], within_s: float, *, by: Source | None = None, receive: Any = None
    ) -> list[Received]:
        """Receive, by default in another process, until all these payloads came or the time has passed."""
        taker, came = by or self.another(), list[Received]()
        for _ in self._looks(within_s):
            came.append(receive() if receive else self.receive(by=taker))
            if set(wanted) <= {payload for received in came for payload in received.data}:
                break
        return came

    def expect_back(self, wanted: Collection[bytes], within_s: float, when: str) -> list[Received]:
        """Expect payloads to come within some seconds."""
        came = self.come(wanted, within_s)
        lacking = set(wanted) - {payload for received in came for payload in received.data}
        self.expect(
            not lacking, f"all {len(wanted)} messages {when}", f"{len(wanted) - len(lacking)}, without {some(lacking)}"
        )
        return came

    def expect_none_of(self, kept: Collection[bytes], when: str) -> None:
        """Expect that the next receive, by another process, gets none of these payloads."""
        wrong = set(self.receive(by=self.another()).data) & set(kept)
        self.expect(not wrong, f"none of {len(kept)} messages {when}", f"{len(wrong)}: {some(wrong)}")

    def acknowledge(self, received: Received, action: str, *, by: Source | None = None) -> list[Refused]:
        """Acknowledge all messages of a receive by one ack action, and finish it, as a run does."""
        source, refused = by or received.source, list[Refused]()
        if source.acknowledges_by_id:
            for ack_ref, ack_ids in received.held():
                refused += source.acknowledge(action, ack_ref, ack_ids)
        source.finish(received.receive_id, received.held)
        return refused

    def lose(self, *lost: Received) -> None:
        """Simulate a crash of the run that received; the next run abandons its receive."""
        for received in lost:
            if not received.source.in_tasks:
                received.source.close()
            self.abandon(received)

    def abandon(self, received: Received) -> None:
        """Abandon the receive of a crashed run, as the next run does."""
        self.another().abandon(received.receive_id, received.held)

    def lapse(self, *lost: Received) -> None:
        """Wait until the lease of a receive expires; without leases, simulate a crash of its run."""
        if self.lease_s is None:
            self.lose(*lost)
        else:
            self.server.sleep(self.lease_s)

    def actions(self, *, ending: bool) -> list[str]:
        """Return the ack actions of the source that end a message, or the others."""
        return [action for action, effect in self.source.ack_actions.items() if effect.ends is ending]

    def becomes(self, answer: Callable[[], object], wanted: object) -> object:
        """Poll until an answer is as wanted, or for `soon_s`; return the last answer. Some servers count late."""
        given = answer()
        for _ in self._looks(self.soon_s):
            if given == wanted:
                break
            given = answer()
        return given

    def opened(self, source: Source) -> Source:
        """Open a source with the control store; it is closed at the end."""
        source.open(self._store)
        self._to_close.append(source)
        return source

    def _looks(self, within_s: float) -> Iterator[None]:
        """Yield for each poll: twice at once, then several times within some seconds of the server's clock and ours."""
        started = time.monotonic()
        for nth in range(TRIES + 1):
            if nth:
                self.server.sleep(within_s / TRIES)
            if nth > 1 and time.monotonic() - started > within_s:
                break  # polls are slow: a lease could expire, and release messages that should arrive at once
            yield


def some(payloads: Collection[bytes]) -> str:
    """Return a few payloads as text."""
    shown = ", ".join(repr(payload[:40]) for payload in sorted(payloads)[:SHOWN])
    return shown + (" and others" if len(payloads) > SHOWN else "")
