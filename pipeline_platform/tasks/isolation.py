"""Isolation: finding the rows that crash their process in few tries, so that each fails alone."""

import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline_platform.lake.reader import rows_at
from pipeline_platform.tasks.callback_process.fork import Death
from pipeline_platform.tasks.record.recording import Recording

BEGUN_AGAIN = 2
"""Average number of times that rows of a block may be repeated before rows that succeeded are tried separately."""

_REPEATS = 5
"""Maximum number of times that a call without callbacks is made: it may crash its process if memory is short."""

Call = Callable[[Any], Any]
"""A try, called with a recording in a callback process. Its answer is the return value (JSON) or a `Death`."""
Tries = Generator[Call, Any, Any]
"""Generator that yields tries and receives their answers. It must be deterministic: the task and each callback process
have a copy."""


class Try(NamedTuple):
    """Rows to try, or to record as failed.

    Attributes:
        rows: Rows in order.
        exact: See `Watch`.
        death: Crash or timeout that the rows fail with; None to try them.
        without_callbacks: Whether `handle_failed` must not be called.
    """

    rows: Sequence[int]
    exact: bool = False
    death: Death | None = None
    without_callbacks: bool = False


def surely(call: Call) -> Tries:
    """Repeat a call that uses no callbacks until it completes. Return its answer.

    Raises:
        RuntimeError: It ended its process each time.
    """
    for _ in range(_REPEATS):
        if not isinstance(answer := (yield call), Death):
            return answer
    raise RuntimeError(f"the callback process ended {_REPEATS} times outside callbacks ({answer.how})")


def each_alone(
    rows: pa.RecordBatch,
    work: Callable[[pa.RecordBatch, Recording], Sequence[int]],
    fail: Callable[[pa.RecordBatch, Recording, Death], None],
    known: Death | None = None,
    *,
    in_order: bool = False,
) -> Tries:
    """Process rows, and fail only those that crash the process or hang.

    Args:
        rows: Rows in order.
        work: Processes rows. Returns the rows that it did not start, in order.
        fail: Records rows that crashed their process or timed out.
        known: Earlier crash or timeout of a callback process at these rows.
        in_order: Whether rows must be processed in order.
    """
    if rows.num_rows:
        yield from isolate(range(rows.num_rows), partial(partial, _do, rows, work, fail), known, in_order=in_order)


def _do(
    rows: pa.RecordBatch,
    work: Callable[[pa.RecordBatch, Recording], Sequence[int]],
    fail: Callable[[pa.RecordBatch, Recording, Death], None],
    attempt: Try,
    recording: Recording,
) -> tuple[int, Sequence[int]]:
    """Run a try. Return the number of rows that it used, and which of them it did not start."""
    some = attempt.rows if attempt.death else attempt.rows[: recording.size.rows]
    these = rows_at(rows, some)
    if attempt.death:
        fail(these, recording.without_callbacks() if attempt.without_callbacks else recording, attempt.death)
        return len(some), ()
    recording.watch.trying(len(some))
    recording.watch.exact, began = attempt.exact, time.monotonic()
    left = work(these, recording)
    recording.size.after(len(some), len(left), time.monotonic() - began)
    return len(some), left


def isolate(
    rows: Sequence[int], make: Callable[[Try], Any], known: Death | None = None, *, in_order: bool = False
) -> Tries:
    """Try rows until each is processed or has failed. Yield `make` of each `Try`.

    All rows are tried together. After a crash, the rows that were being processed are tried alone, and then the other
    rows together. If the suspects do not crash alone, the cause is something else (for example a thread), and halves
    are tried. Rows whose call timed out are culprits for certain.

    Args:
        rows: Rows in order.
        make: Makes the call of a try. Its answer is a `Death`, or the number of rows that it used and which of them it
            did not start, as indexes into the try.
        known: Answer of the first try, if it was made before.
        in_order: Whether rows must be processed in order. The suspects and the rows between them are then tried
            separately from the rows before and after.
    """
    exact = False  # an exact try is several times slower, so it is used only if needed

    def tried(rows: Sequence[int], *, in_order: bool) -> Tries:
        """Return whether a row failed."""
        nonlocal exact, known
        failed, begun_in_vain = False, 0
        parts = [(list(rows), True)]  # a stack of parts, and whether the rows of a crash are trusted as suspects
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
                parts.append((part, trust))  # the side effects of an earlier try may be the cause
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
    if isinstance(again, Death):  # `handle_failed` crashes too
        yield from surely(make(Try(rows, death=death, without_callbacks=True)))
