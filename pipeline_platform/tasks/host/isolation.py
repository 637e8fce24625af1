"""Isolation: which of some rows end their process, found in few tries, so that each fails alone."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline_platform.tasks.host.fork import Death
from pipeline_platform.tasks.record.outcomes import Outcomes

BEGUN_AGAIN = 2
"""How often the rows of a block may be begun in vain, on average, before rows that were well are tried apart."""

QUICK_S = 0.5
"""What takes less is followed by twice as many rows at once: to give something back takes a millisecond or more."""

Call = Callable[[Any], Any]
"""A try: a host calls it with its recorder. What it returns, as JSON has it, or its death is what the try came to."""
Tries = Generator[Call, Any, Any]
"""Yields tries, and gets what each came to. The task and each host have one, which yield the same."""


class Try(NamedTuple):
    """Rows to be tried, or recorded with the death that they died.

    Attributes:
        rows: In order.
        exact: See `Watch`.
        death: What they fail with; None to try them.
        without_callbacks: Whether not even `handle_failed` may be called.
    """

    rows: Sequence[int]
    exact: bool = False
    death: Death | None = None
    without_callbacks: bool = False


def surely(call: Call) -> Tries:
    """Have something recorded that calls no callback, whatever else ends the process."""
    while isinstance((yield call), Death):
        pass


def each_alone(
    rows: pa.RecordBatch,
    work: Callable[[pa.RecordBatch, Outcomes], Sequence[int]],
    fail: Callable[[pa.RecordBatch, Outcomes, Death], None],
    known: Death | None = None,
    *,
    in_order: bool = False,
) -> Tries:
    """Have rows dealt with, whichever of them end the process that does, or hang.

    Args:
        rows: In order.
        work: Deals with rows; returns which it did not begin, in order.
        fail: Records rows that ended their process or took too long.
        known: How a host died of these rows before.
        in_order: Whether no row may be dealt with before those that precede it.
    """
    if rows.num_rows:
        yield from isolate(range(rows.num_rows), partial(partial, _do, rows, work, fail), known, in_order=in_order)


def _do(
    rows: pa.RecordBatch,
    work: Callable[[pa.RecordBatch, Outcomes], Sequence[int]],
    fail: Callable[[pa.RecordBatch, Outcomes, Death], None],
    one: Try,
    outcomes: Outcomes,
) -> tuple[int, Sequence[int]]:
    """Make a try; return how many rows it took up, and which of these it did not begin."""
    some = one.rows if one.death else one.rows[: outcomes.most_rows]
    these = rows if len(some) == rows.num_rows else rows.take(pa.array(some, pa.int64()))
    if one.death:
        with outcomes.without_callbacks() if one.without_callbacks else nullcontext():
            fail(these, outcomes, one.death)
        return len(some), ()
    outcomes.watch.trying(len(some))
    outcomes.watch.exact = one.exact
    began, chunk_size = time.monotonic(), outcomes.step.pipeline.processors.chunk_size
    left = work(these, outcomes)
    if outcomes.most_rows is not None:
        if left:  # it held many children: permits for more would be lost
            outcomes.most_rows = max(1, len(some) - len(left))
        elif time.monotonic() - began > QUICK_S:
            outcomes.most_rows = min(outcomes.most_rows, chunk_size)
        elif len(some) == outcomes.most_rows:
            outcomes.most_rows *= 2
    return len(some), left


def isolate(
    rows: Sequence[int], make: Callable[[Try], Any], known: Death | None = None, *, in_order: bool = False
) -> Tries:
    """Try rows until each is dealt with or has failed; yield each `Try` as `make` makes it.

    Rows are tried together. Where that dies, the rows that it was busy with go alone, and then all others together.
    Where these do not die alone, something else ended the process (a thread, say), and halves are tried. Rows
    whose call took too long are culprits for certain.

    Args:
        rows: In order.
        make: Makes what a try comes to: a `Death`, or how many rows it took up, and which of these it did not begin.
            It numbers rows by their place in the try.
        known: What the first try came to, if it was made before.
        in_order: Whether no row may be dealt with before those that precede it. Then the rows that it was busy with,
            and what lies between them, go apart from those before and after.
    """
    exact = False  # to build columns for each message by itself takes several times as long: only once it is needed

    def tried(rows: Sequence[int], *, in_order: bool) -> Tries:
        """Return whether a row failed."""
        nonlocal exact, known
        failed, begun_in_vain = False, 0
        parts = [(list(rows), True)]  # the first one last, and whether to believe a death in what it had
        while parts:
            part, trust = parts.pop()
            if not part:
                continue
            death = known or (yield make(Try(part, exact)))
            known = None
            if not isinstance(death, Death):
                count, not_begun = death
                parts.append(([*(part[row] for row in not_begun), *part[count:]], trust))
                continue
            if death.has_several and not exact:
                exact = True
                parts.append((part, trust))
                continue
            count = death.tried or len(part)
            begun, left = part[:count], part[count:]
            had = {begun[row] for row in death.rows}
            culprits = [row for row in begun if row in had]
            if len(begun) == 1 and death.in_time and death.tries > 1:
                parts.append((part, trust))  # what a row left behind that the host had before may have ended it
                continue
            if len(begun) == 1 or (culprits and not death.in_time):
                culprits = culprits or begun
                yield from _record(culprits, death, make)
                failed = True
            elif trust and not in_order and 0 < len(culprits) < len(begun):
                trust = yield from tried(culprits, in_order=False)
                failed |= trust
            else:
                first, end = 0, len(begun) // 2
                if (
                    trust
                    and in_order
                    and culprits
                    and len(begun) > begun.index(culprits[-1]) - begun.index(culprits[0]) + 1
                ):
                    first, end = begun.index(culprits[0]), begun.index(culprits[-1]) + 1
                pieces = left, begun[end:], begun[first:end], begun[:first]
                parts += [(piece, trust) for piece in pieces]
                continue
            done = set(culprits)
            before = begun[: begun.index(culprits[0])]
            after = [row for row in begun[len(before) :] if row not in done]
            begun_in_vain += len(before)
            if begun_in_vain <= BEGUN_AGAIN * len(rows):
                parts.append((before + after + left, trust))
            else:
                parts += [(after + left, trust), (before, trust)]
        return failed

    return (yield from tried(rows, in_order=in_order))


def _record(rows: Sequence[int], death: Death, make: Callable[[Try], Any]) -> Tries:
    again: Any = death
    if death.callback != "handle_failed":
        again = yield make(Try(rows, death=death))
    while isinstance(again, Death):  # `handle_failed` cannot bear it
        again = yield make(Try(rows, death=death, without_callbacks=True))
