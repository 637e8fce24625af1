"""The suite for sources: correct sources pass, and a source that breaks a promise fails that promise alone."""

import functools
import time
from collections.abc import Iterator
from contextlib import closing
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from pipeline_platform import Backlog, Extent, LogSource, Share
from pipeline_platform.control.demand import NOTHING, next_ask
from pipeline_platform.control.store import ControlStore
from pipeline_platform.testing import (
    PAGES,
    PAYLOADS,
    TEXTS,
    BrokenPromiseError,
    Report,
    Server,
    check_source,
    promises_of,
)
from pipeline_platform.testing.trial import PROMISES
from tests.control.test_demand import LIMITS
from tests.fixtures.broken_sources import BROKEN, Altered, CountsWhatIsHeld, LosesOne
from tests.fixtures.memory_sources import MEMORY, MemoryChannel, MemoryLog, MemoryQueue, away, cut


def server(kind: type[Any], **more: Any) -> Server:
    missing = lambda: kind(name="memory", queue="not-there")  # noqa: E731
    return Server(sleep=MEMORY.sleep, many=PAGES[:300], missing=missing, away=away, cut=cut, **more)


def check(kind: type[Any], only: Any = None, **options: Any) -> Report:
    return check_source(lambda: kind(name="memory", queue=MEMORY.create(), **options), server(kind), only=only)


checked = functools.cache(check)


WAITS = ("waits_take_nothing", "waits_end_with_a_message")


def broken_of(kind: type[Any], only: Any = None) -> list[BrokenPromiseError]:
    with pytest.raises(ExceptionGroup) as caught:
        check(kind, only)
    return list(caught.value.exceptions)  # type: ignore[arg-type]


class WithoutIdentity(Altered):
    has_identity = False
    column = "message_id"

    def altered(self, row: dict[str, Any]) -> Any:
        return str(next(MEMORY.numbers))


class Silent(MemoryQueue):
    def backlog(self) -> Backlog:
        return super().backlog()._replace(messages=None)


class MemoryLogWithGaps(MemoryLog):
    """A message at each third offset."""

    has_gaps = True

    def extents(self) -> dict[str, Extent]:
        return {
            partition: extent._replace(past=3 * (extent.past or 0)) for partition, extent in super().extents().items()
        }

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        for partition, first, past, reached in share.at["spans"]:
            log = self.partitions[int(partition)]
            offsets = [offset for offset in range(first, past) if offset % 3 == 0]
            yield self.deliveries(
                message_id=[f"{partition}-{offset}" for offset in offsets],
                data=[log[offset // 3] for offset in offsets],
                ack_id=[str(offset) for offset in offsets],
                ack_ref=partition,
                redelivered=[offset < reached for offset in offsets],
                partition=partition,
                sequence=offsets,
            )


class OneReceiveAtATime(MemoryQueue):
    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        held = any(entry.holder and entry.until > MEMORY.clock for entry in self.entries)
        return [] if held else super().plan(demand, concurrency, receive_id)


@pytest.mark.parametrize(
    "kind", [MemoryQueue, MemoryLog, MemoryLogWithGaps, MemoryChannel, WithoutIdentity, Silent, OneReceiveAtATime]
)
def test_a_correct_source_passes_all_applicable_promises(kind):
    report = checked(kind)
    assert set(report.kept) | set(report.not_asked) == set(PROMISES)
    assert set(report.kept) <= set(promises_of(kind))
    assert report.figures["backlog"] > 0


class CountsTooFew(MemoryLogWithGaps):
    counted: ClassVar[int] = 3

    def backlog(self) -> Backlog:
        return super().backlog()._replace(messages=self.counted)


class NeverShrinks(CountsTooFew):
    counted: ClassVar[int] = 1_000


@pytest.mark.parametrize("kind", [CountsTooFew, NeverShrinks])
def test_a_wrong_backlog_of_a_log_with_gaps_is_refused(kind):
    with pytest.raises(BrokenPromiseError, match=rf"seen: +{kind.counted}$"):
        check(kind, only="backlogs_are_right")


def test_a_log_without_an_end_passes_and_its_backlog_is_endless():
    class Endless(MemoryLog):
        def extents(self) -> dict[str, Extent]:
            return {"0": Extent(low=0, past=None, committed=None, begin=0)}

    source = Endless(name="endless", queue=MEMORY.create())
    with TemporaryDirectory() as folder, closing(ControlStore(f"sqlite:///{folder}/control.sqlite")) as store:
        source.open(store)
        backlog = source.backlog()
        shares = source.plan(10, 1, "r")

    assert (str(backlog), str(Backlog(1_234, counts_gaps=True))) == (
        "an endless number of messages",
        "up to 1,234 messages",
    )
    assert next_ask(backlog, LIMITS, NOTHING, None).because == "messages without end at the source"
    assert shares == [Share(at={"spans": [["0", 0, 10, 0]]}, messages=10)]


def test_a_log_that_gives_a_partition_to_one_receive_at_a_time_is_correct():
    report = check(MemoryLog, one_receive_per_partition=True)
    assert report.not_asked["positions_wait_for_gaps"] == "it leases a partition to one receive at a time"


def test_each_promise_is_asked_of_a_correct_source():
    kept = [name for kind in (MemoryQueue, MemoryLog, MemoryChannel) for name in checked(kind).kept]
    kept += check(MemoryLog, ["partitions_are_leased_once"], one_receive_per_partition=True).kept
    assert set(kept) == set(PROMISES), "a promise that is asked of nobody would show nothing"


@pytest.mark.parametrize(("promise", "kind"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_the_broken_promise_of_a_source_is_named(promise, kind):
    # It really waits, and correct sources show that it is kept.
    asked = [name for name in promises_of(kind) if promise in WAITS or name != WAITS[-1]]
    assert [error.promise for error in broken_of(kind, asked)] == [promise]


def test_each_promise_has_a_source_that_breaks_it():
    assert {promise for promise, _ in BROKEN} == set(PROMISES)


def test_an_error_contains_the_promise_the_expected_and_the_actual_result():
    with pytest.raises(BrokenPromiseError) as caught:
        check(CountsWhatIsHeld, only="backlogs_are_right")
    assert str(caught.value).splitlines() == [
        f"backlogs_are_right: {PROMISES['backlogs_are_right'].says}",
        "  expected: 5 messages while a receive has 5",
        "  seen:     10",
    ]


def test_an_exception_of_a_source_is_the_cause_of_the_broken_promise():
    class Raises(MemoryQueue):
        def ack(self, ack_ref: Any, ack_ids: Any) -> Any:
            raise RuntimeError("out of paper")

    with pytest.raises(BrokenPromiseError, match="RuntimeError: out of paper") as caught:
        check(Raises, only="what_is_ended_is_gone")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_promises_that_depend_on_a_broken_promise_are_skipped():
    with pytest.raises(
        ExceptionGroup, match=r"LosesOne breaks nothing_is_lost; skipped [0-9]+ promises that depend on it"
    ):
        check(LosesOne)


class CountsWrongly(CountsWhatIsHeld):
    def send(self, payloads: Any, metadata: Any = None) -> int:
        return 1 + super().send(payloads)


def test_all_promises_that_a_source_breaks_are_named():
    assert {error.promise for error in broken_of(CountsWrongly)} == {"backlogs_are_right", "sending_is_counted"}


def test_promises_that_a_server_cannot_show_are_skipped():
    able = Server(sleep=MEMORY.sleep, many=(), says_lost=False)
    report = check_source(lambda: MemoryQueue(name="memory", queue=MEMORY.create()), able)
    assert report.not_asked["what_is_away_is_an_error"] == "its server cannot be unavailable (away)"
    assert report.not_asked["acknowledging_late_is_refused"] == "its server does not report lost leases (says_lost)"
    assert report.not_asked["many_are_delivered_and_acknowledged"] == "its server has no payloads for it (many)"


def test_a_single_promise_can_be_checked():
    assert check(MemoryQueue, only="leases_end").kept == ["leases_end"]
    assert check(MemoryQueue, only=["leases_end", "delays_are_kept"]).kept == ["leases_end", "delays_are_kept"]
    with pytest.raises(ValueError, match=r"'lease_ends' is not a promise\. Did you mean 'leases_end'"):
        check(MemoryQueue, only="lease_ends")


class Ticks(LogSource):
    """A source of generated numbers, without `send`."""

    def extents(self) -> Any:
        return {"ticks": Extent(0, len(TEXTS), None, 0)}

    def read(self, share: Any, receive_id: str) -> Any:
        for _, first, past, reached in share.at["spans"]:
            at = range(first, past)
            ids, again = [str(n) for n in at], [n < reached for n in at]
            yield self.deliveries(
                message_id=ids, data=TEXTS[first:past], ack_id=ids, ack_ref="ticks", redelivered=again
            )

    def commit(self, acknowledged_to: Any) -> None:
        pass


def test_a_source_without_send_is_checked_with_given_payloads():
    with pytest.raises(ExceptionGroup) as caught:
        check_source(lambda: Ticks(name="ticks"), Server(payloads=TEXTS, sleep=MEMORY.sleep))
    assert [error.promise for error in caught.value.exceptions] == ["logs_remember"]  # type: ignore[union-attr]


def test_an_error_of_the_server_is_not_blamed_on_the_source():
    def send(source: Any, payloads: Any) -> None:
        raise ConnectionError("no such host")

    with pytest.raises(ConnectionError, match="no such host"):
        check_source(lambda: MemoryQueue(name="m", queue=MEMORY.create()), server(MemoryQueue, send=send))


def test_payloads_must_be_distinct():
    with pytest.raises(ValueError, match=r"Server\.payloads: must be 10 or more different payloads, got 1 .* of 2"):
        Server(payloads=[b"a", b"a"])
    assert set(TEXTS) < set(PAYLOADS)
    assert Server().sleep is time.sleep
