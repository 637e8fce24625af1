"""Isolation: a callback that ends its process, hangs or spoils it costs no message but its own.

A task calls no callback itself: its process stays clean. A host does, a fork that does all of the task's part. Where
that dies, forks do it on some rows at a time, and give back as Arrow what they would have written. One that dies is
followed by another without the culprit; where that is unknown, by others with fewer rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import pyarrow as pa

from pipeline_platform.tasks.host.calling_step import CallingStep, Sink
from pipeline_platform.tasks.host.fork import Death, Written, in_a_fork
from pipeline_platform.tasks.host.progress import Progress, Watch, end_copy
from pipeline_platform.tasks.record.outcomes import Outcomes

BEGUN_AGAIN = 2
"""How often the rows of a block may be begun in vain, on average, before rows that were well are tried apart."""

QUICK_S = 0.5
"""A fork that takes less is followed by one with twice as many rows: to fork takes 10 ms or more."""


class Isolation:
    """Has the callbacks of one task called: here, where this is a host, or in forks.

    Each fork has an instance of the pipeline, and so connections, of its own.

    Attributes:
        forks: Whether callbacks are called in forks.
        outcomes: Where everything is recorded in the end. In a task that forks it calls no callback.
    """

    def __init__(self, step: CallingStep, sink: Sink, watch: Watch | None, death: Death | None = None) -> None:
        """Prepare to have callbacks called.

        Args:
            step: Whose.
            sink: What takes all rows in the end.
            watch: Learns where callbacks are that are called here; None to call them in forks.
            death: How the host died that did all of this before.
        """
        self.forks = watch is None
        if watch is not None:
            self.outcomes = Outcomes(step, sink, step.pipeline(), watch)
            end_copy()
        else:
            self.outcomes = Outcomes(step, sink)
        self._step, self._sink, self._limit = step, sink, step.limit()
        self._watch, self._death, self._block = watch, death, 0
        self._most = self._chunk = step.pipeline.processors.chunk_size  # rows of a fork

    def begin_block(self) -> Death | None:
        """Begin with other rows; return how the host died that dealt with these before, if that says which it was."""
        self._block += 1
        if self._watch is not None:
            self._watch.begin_block(self._block)
        death = self._death
        return death if death and death.block == self._block and death.rows else None

    def deal(
        self,
        rows: pa.RecordBatch,
        work: Callable[[pa.RecordBatch, Outcomes, float | None], Sequence[int]],
        fail: Callable[[pa.RecordBatch, Outcomes, Death], None],
        permitted: Callable[[int], tuple[int, float]] = lambda wanted: (wanted, math.inf),
        give_back: Callable[[pa.RecordBatch, Outcomes], None] | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        """Have rows dealt with, whichever of them end the process that does, or hang.

        Args:
            rows: In order.
            work: Deals with rows; returns which it did not begin, in order. A fork gets a time on the monotonic clock,
                and begins none after it.
            fail: Records rows that ended their process or took too long.
            permitted: Called before each try in a fork, which must not touch the connections of its parent: how many
                of some rows may be dealt with, and until when. 0 where none may any more.
            give_back: Records rows that may not be dealt with any more.
            in_order: Whether no row may be dealt with before those that precede it.
        """
        known = self.begin_block()
        if not rows.num_rows:
            return
        if not self.forks:
            left = work(rows, self.outcomes, None)
            if give_back and left:
                give_back(rows.take(pa.array(left, pa.int64())), self.outcomes)
            return
        self._deal_in_forks(rows, work, fail, permitted, give_back, known, in_order=in_order)

    def _deal_in_forks(
        self,
        rows: pa.RecordBatch,
        work: Callable[[pa.RecordBatch, Outcomes, float | None], Sequence[int]],
        fail: Callable[[pa.RecordBatch, Outcomes, Death], None],
        permitted: Callable[[int], tuple[int, float]],
        give_back: Callable[[pa.RecordBatch, Outcomes], None] | None,
        known: Death | None,
        *,
        in_order: bool,
    ) -> None:
        """See `deal`; `known` is how a host died of all these rows before."""
        exact = False  # to build columns for each message by itself takes several times as long: only once it is needed
        in_time = True

        def attempt(some: Sequence[int]) -> _Tried:
            nonlocal exact, in_time, known
            if known is not None:  # a host had all of these rows
                death, known = known, None
                exact = death.has_several
                return (None, some) if exact else (_renamed(death, some), ())
            # Where preparing took longer than permits hold, one message begins late: the others never would.
            count, until = permitted(min(len(some), self._most) if in_time else 1)
            if give_back and not count:
                give_back(rows.take(pa.array(some, pa.int64())), self.outcomes)
                return None, ()
            chosen = rows.take(pa.array(some[:count], pa.int64()))
            begin_until = until if in_time else math.inf
            began = time.monotonic()
            answer = self.fork(lambda outcomes: work(chosen, outcomes, begin_until), exact=exact)
            if not isinstance(answer, Death):
                in_time = len(answer) < count
                now = time.monotonic()
                if answer and now < begin_until:  # it held many children: permits for more would be lost
                    self._most = max(1, count - len(answer))
                elif now - began > QUICK_S and self._most >= self._chunk:
                    self._most = self._chunk
                elif count == self._most:
                    self._most *= 2
                return None, [*(some[row] for row in answer), *some[count:]]
            if answer.has_several and not exact:
                exact = True
                return None, some
            return _renamed(answer, some), some[count:]

        def record(some: Sequence[int], death: Death) -> None:
            these = rows.take(pa.array(some, pa.int64()))
            again: Sequence[int] | Death = death
            if death.callback != "handle_failed":
                again = self.fork(lambda outcomes: fail(these, outcomes, death), exact=False)
            if isinstance(again, Death):  # `handle_failed` cannot bear it
                fail(these, self.outcomes, death)

        isolate(range(rows.num_rows), attempt, record, in_order=in_order)

    def fork(self, work: Callable[[Outcomes], Sequence[int] | None], *, exact: bool = True) -> Sequence[int] | Death:
        """Have a fork work on some rows and record here what it recorded; return its answer, or how it died.

        Args:
            work: Called in the fork.
            exact: See `Watch`; without it as many rows as were at work are the culprits of a death.
        """

        def child(progress: Progress) -> Written:
            written = Written()
            outcomes = Outcomes(self._step, written, self._step.pipeline(), progress)
            end_copy()
            written.notes = {"answer": work(outcomes) or (), "tally": outcomes.tally.to_json()}
            return written

        answer = in_a_fork(child, exact=exact, limit=self._limit, outside=self._step.outside)
        if isinstance(answer, Death):
            return answer
        for table, window, batch in answer.batches:
            self._sink.write(table, window, batch)
        self.outcomes.tally.add(answer.notes["tally"])
        return [int(row) for row in answer.notes["answer"]]


def _renamed(death: Death, some: Sequence[int]) -> Death:
    """A death in which rows have the numbers that they had before some were chosen."""
    return death._replace(rows=[some[row] for row in death.rows])


_Tried = tuple[Death | None, Sequence[int]]


def isolate(
    rows: Sequence[int],
    attempt: Callable[[Sequence[int]], _Tried],
    fail: Callable[[Sequence[int], Death], None],
    *,
    in_order: bool = False,
) -> bool:
    """Have rows dealt with, whichever of them end the process that does; return whether a row failed.

    Rows are attempted together. Where that dies, the rows that it was busy with go alone, and then all others together.
    Where these do not die alone, something else ended the process (a thread, say), and halves are attempted. Rows
    whose call took too long are culprits for certain.

    Args:
        rows: In order.
        attempt: Deals with rows in another process. Returns how it died, if it did, and the rows that it did not begin,
            in order: the last ones, if it died. It names rows as they are given here.
        fail: Called for rows that end their process alone or take too long.
        in_order: Whether no row may be dealt with before those that precede it. Then the rows that it was busy with,
            and what lies between them, go apart from those before and after.
    """
    failed, begun_in_vain = False, 0
    parts = [(list(rows), True)]  # the first one last, and whether to believe a death in what it had
    while parts:
        part, trust = parts.pop()
        if not part:
            continue
        death, rest = attempt(part)
        left = list(rest)
        if death is None:
            parts.append((left, trust))
            continue
        tried = part[: len(part) - len(left)]
        had = set(death.rows)
        culprits = [row for row in tried if row in had]
        if len(tried) == 1 or (culprits and not death.in_time):
            culprits = culprits if len(tried) > 1 else tried
            fail(culprits, death)
            failed = True
        elif trust and not in_order and 0 < len(culprits) < len(tried):
            trust = isolate(culprits, attempt, fail)
            failed |= trust
        else:
            first, end = 0, len(tried) // 2
            if (
                trust
                and in_order
                and culprits
                and len(tried) > tried.index(culprits[-1]) - tried.index(culprits[0]) + 1
            ):
                first, end = tried.index(culprits[0]), tried.index(culprits[-1]) + 1
            pieces = left, tried[end:], tried[first:end], tried[:first]
            parts += [(piece, trust) for piece in pieces]
            continue
        done = set(culprits)
        before = tried[: tried.index(culprits[0])]
        after = [row for row in tried[len(before) :] if row not in done]
        begun_in_vain += len(before)
        if begun_in_vain <= BEGUN_AGAIN * len(rows):
            parts.append((before + after + left, trust))
        else:
            parts += [(after + left, trust), (before, trust)]
    return failed
