"""One promise of sources, tried on a queue of its own: receives, what becomes of them, and what is expected to come."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from pipeline_platform.source.contract import Refused, Share, Source
from pipeline_platform.testing.server_under_test import Server

Check = Callable[[Any], None]
"""Takes a `Trial`."""


class BrokenPromiseError(AssertionError):
    """A source does not keep a promise; its name is in `promise`."""

    def __init__(self, promise: Promise, expected: str, seen: str) -> None:
        self.promise = promise.name
        super().__init__(f"{promise.name}: {promise.says}\n  expected: {expected}\n  seen:     {seen}")


class NotAskedError(Exception):
    """A promise does not concern this source; the message says why."""


class Promise(NamedTuple):
    """What sources promise: what it says, in one sentence, of which family, and a check that raises where it is broken.

    Attributes:
        builds_on: Names of promises without which it cannot be kept; it is not asked where one of them is broken.
        messages: How many wait when it is tried; None for all payloads.
        many: Whether so many wait that they take several calls of the server: `Server.many` in place of `payloads`.
    """

    name: str
    says: str
    family: type[Any]
    builds_on: Sequence[str]
    messages: int | None
    many: bool
    check: Check


PROMISES: dict[str, Promise] = {}
"""All there are, by name."""

DELIVERS = (
    "nothing_is_lost", "payloads_are_untouched", "pickles_without_clients", "closing_unused_is_harmless",
)  # fmt: skip
"""What nearly all others build on."""


def promise(
    *,
    family: type[Any] = Source,
    builds_on: Sequence[str] = DELIVERS,
    messages: int | None = None,
    many: bool = False,
) -> Callable[[Check], Check]:
    """Make a promise of a function that tries it; the first line of its docstring is what it says."""

    def register(check: Check) -> Check:
        name, says = check.__name__, str(check.__doc__).partition("\n")[0]
        PROMISES[name] = Promise(name, says, family, builds_on, messages, many, check)
        return check

    return register


MANY = 10_000
"""A demand that takes all."""
SHOWN = 3
"""Payloads that an error shows."""
TRIES = 40
"""Looks at the most, until something is there that is waited for."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Received:
    """What one receive got: as planned, and as delivered."""

    source: Source
    receive_id: str
    shares: Sequence[Share]
    rows: list[Row] = field(default_factory=list)

    @property
    def data(self) -> list[bytes]:
        """The payloads."""
        return [row["data"] for row in self.rows]

    def held(self) -> list[tuple[str, list[str]]]:
        """What a run would have written down: `ack_id`s in groups of one `ack_ref`."""
        groups: dict[str, list[str]] = {}
        for row in self.rows:
            groups.setdefault(row["ack_ref"], []).append(row["ack_id"])
        return list(groups.items())

    def part(self, rows: Iterable[Row]) -> Received:
        """The same receive with some of its messages."""
        return Received(self.source, self.receive_id, self.shares, list(rows))


class Trial:
    """A new queue with the messages `sent` in it, and an open source of it.

    A lease lasts `lease_s` where nobody extends it; None where nothing runs out. `figures` are measured, in seconds.
    """

    def __init__(self, promise: Promise, build: Callable[[], Source], server: Server, folder: Path) -> None:
        self.promise, self.server = promise, server
        self.figures: dict[str, float] = {}
        self._numbers, self._folder, self._to_close, self._stores = count(1), folder, list[Source](), list[Any]()
        self.source = build()
        self.new_store()
        every_s = self.source.extend_every_s
        self.lease_s: float | None = getattr(self.source, "lease_s", every_s and 3 * every_s)
        self.sent = list(server.payloads)
        if (send := server.sender(self.source)) is not None:
            self.sent = list(server.many) if promise.many else self.sent[: promise.messages]
            send(self.sent)

    @property
    def has_abandon(self) -> bool:
        """Whether `abandon` does anything."""
        return type(self.source).abandon is not Source.abandon

    @property
    def soon_s(self) -> float:
        """Seconds within which something comes that comes at once: no lease ends meanwhile."""
        return 2.0 if self.lease_s is None else self.lease_s / 2

    @property
    def patience_s(self) -> float:
        """Seconds within which something comes that has to wait for a lease to end."""
        return 5.0 if self.lease_s is None else 4 * self.lease_s

    def new_store(self) -> Source:
        """Forget all that was known of positions; return the source, open."""
        from pipeline_platform.control.store import ControlStore

        self._store = ControlStore(f"sqlite:///{self._folder}/{len(self._stores)}.sqlite")
        self._stores.append(self._store)
        return self.opened(self.source)

    def another(self) -> Source:
        """The same source in another process."""
        copy: Source = pickle.loads(pickle.dumps(self.source))  # noqa: S301 - our own
        return self.opened(copy)

    def close(self) -> None:
        """Close all that was opened."""
        for source in self._to_close:
            source.close()
        for store in self._stores:
            store.close()

    def need(self, condition: object, reason: str) -> None:
        """Raise `NotAskedError` with the reason, unless a condition holds."""
        if not condition:
            raise NotAskedError(reason)

    def expect(self, condition: object, expected: str, seen: object) -> None:
        """Raise `BrokenPromiseError`, unless a condition holds."""
        if not condition:
            raise BrokenPromiseError(self.promise, expected, str(seen))

    def receive(self, *, by: Source | None = None, demand: int = MANY, concurrency: int = 2) -> Received:
        """Plan and read, as a run does."""
        source, receive_id = by or self.source, f"receive-{next(self._numbers)}"
        shares = source.plan(demand, concurrency, receive_id)
        rows = [row for share in shares for batch in source.read(share, receive_id) for row in batch.to_pylist()]
        return Received(source, receive_id, shares, rows)

    def first(self, *, by: Source | None = None, demand: int = MANY) -> Received:
        """Receive something of what waits."""
        for _ in self._looks(self.soon_s):
            received = self.receive(by=by, demand=demand)
            if received.rows:
                return received
        raise BrokenPromiseError(self.promise, "a message of those that wait", "none")

    def come(
        self, wanted: Collection[bytes], within_s: float, *, by: Source | None = None, receive: Any = None
    ) -> list[Received]:
        """Receive until all these payloads came, or time is up; another process does it, unless `by` says who."""
        taker, came = by or self.another(), list[Received]()
        for _ in self._looks(within_s):
            came.append(receive() if receive else self.receive(by=taker))
            if set(wanted) <= {payload for one in came for payload in one.data}:
                break
        return came

    def expect_back(self, wanted: Collection[bytes], within_s: float, when: str) -> list[Received]:
        """Expect payloads to come within some seconds."""
        came = self.come(wanted, within_s)
        lacking = set(wanted) - {payload for one in came for payload in one.data}
        self.expect(
            not lacking, f"all {len(wanted)} messages {when}", f"{len(wanted) - len(lacking)}, without {some(lacking)}"
        )
        return came

    def expect_none_of(self, kept: Collection[bytes], when: str) -> None:
        """Expect that the next receive, by another process, gets none of these payloads."""
        wrong = set(self.receive(by=self.another()).data) & set(kept)
        self.expect(not wrong, f"none of {len(kept)} messages {when}", f"{len(wrong)}: {some(wrong)}")

    def acknowledge(self, received: Received, word: str, *, by: Source | None = None) -> list[Refused]:
        """Acknowledge all messages of a receive by one word, and finish it, as a run does."""
        source, refused = by or received.source, list[Refused]()
        if source.acknowledges_by_id:
            for ack_ref, ack_ids in received.held():
                refused += source.acknowledge(word, ack_ref, ack_ids)
        source.finish(received.receive_id)
        return refused

    def lose(self, *lost: Received) -> None:
        """Let the run that received die; the next one clears up after it."""
        for received in lost:
            if not received.source.in_tasks:
                received.source.close()
            self.abandon(received)

    def abandon(self, received: Received) -> None:
        """Give a dead receive up, as the next run does."""
        self.another().abandon(received.receive_id, received.held)

    def lapse(self, *lost: Received) -> None:
        """Let a receive's time be over; where nothing runs out its run dies."""
        if self.lease_s is None:
            self.lose(*lost)
        else:
            self.server.sleep(self.lease_s)

    def words(self, *, ending: bool) -> list[str]:
        """The source's words that end a message, or those that do not."""
        return [word for word, one in self.source.words.items() if one.ends is ending]

    def becomes(self, answer: Callable[[], object], wanted: object) -> object:
        """Ask until an answer is as wanted, or a while is over; return the last one. Some servers count late."""
        given = answer()
        for _ in self._looks(self.soon_s):
            if given == wanted:
                break
            given = answer()
        return given

    def opened(self, source: Source) -> Source:
        """A source that knows of positions, and is closed in the end."""
        source.open(self._store)
        self._to_close.append(source)
        return source

    def _looks(self, within_s: float) -> Iterator[None]:
        """Look at once, once more, and several times within some seconds, by the server's clock and by ours."""
        started = time.monotonic()
        for nth in range(TRIES + 1):
            if nth:
                self.server.sleep(within_s / TRIES)
            if nth > 1 and time.monotonic() - started > within_s:
                break  # looks take long: a lease could end, and give back what should come at once
            yield


def error_of(call: Callable[[], object]) -> Exception | None:
    """What a call raises; None if nothing."""
    try:
        call()
    except Exception as error:
        return error
    return None


def some(payloads: Collection[bytes]) -> str:
    """A few payloads, in words."""
    shown = ", ".join(repr(payload[:40]) for payload in sorted(payloads)[:SHOWN])
    return shown + (" and others" if len(payloads) > SHOWN else "")
