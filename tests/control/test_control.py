"""The control store: what several runs agree on, whatever happens to them."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import pickle
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline_platform.control.store import ControlStore, ControlStoreError, Grant, interval_end
from pipeline_platform.model.options import RateLimiting
from tests.fixtures.processes import PROCESSES

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TEN_A_MINUTE = RateLimiting(allowed_messages=10, interval=timedelta(minutes=1))
MINUTE = timedelta(minutes=1)
one_store_for_all_examples = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
_names = (f"pipeline_{number}" for number in itertools.count())


class Clock:
    """A clock to turn: seconds since the epoch."""

    def __init__(self, now: datetime = NOON) -> None:
        self.now = now.timestamp()

    def __call__(self) -> float:
        return self.now


def noon() -> float:
    return NOON.timestamp()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path}/new/control.db"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(url, clock):
    store = ControlStore(url, now=clock)
    yield store
    store.close()


# Permits


def test_an_interval_gives_its_permits_and_no_more(store, clock):
    clock.now += 15
    assert store.take("flights", TEN_A_MINUTE, 7) == Grant(7, 45)
    assert store.take("flights", TEN_A_MINUTE, 7) == Grant(3, 45)
    assert store.take("flights", TEN_A_MINUTE, 7) == Grant(0, 45)


def test_permits_that_were_not_taken_die_with_their_interval(store, clock):
    store.take("flights", TEN_A_MINUTE, 1)
    clock.now += 60
    assert store.take("flights", TEN_A_MINUTE, 100).messages == 10


def test_pipelines_do_not_share_permits(store):
    store.take("flights", TEN_A_MINUTE, 10)
    assert store.take("trains", TEN_A_MINUTE, 10).messages == 10


def test_without_a_limit_all_is_permitted_for_ever(store):
    assert store.take("flights", None, 10**6) == Grant(10**6, math.inf)
    assert store.spare("flights", None, MINUTE) is None


def test_asking_for_no_permit_is_refused(store):
    with pytest.raises(ValueError, match="wanted is 0"):
        store.take("flights", TEN_A_MINUTE, 0)


def test_a_clock_set_back_finds_the_interval_as_it_was(store, clock):
    store.take("flights", TEN_A_MINUTE, 10)
    clock.now += 61
    store.take("flights", TEN_A_MINUTE, 1)
    clock.now -= 2
    assert store.take("flights", TEN_A_MINUTE, 1).messages == 0


def test_intervals_that_are_over_are_removed(store, clock):
    for _ in range(10):
        store.take("flights", TEN_A_MINUTE, 1)
        clock.now += 60

    with store._database.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM control_intervals").scalar() <= 3


def test_spare_counts_the_intervals_that_begin_before_the_horizon(store, clock):
    clock.now += 15
    store.take("flights", TEN_A_MINUTE, 4)

    spare = partial(store.spare, "flights", TEN_A_MINUTE)
    assert spare(timedelta(0)) == 6
    assert spare(timedelta(seconds=45)) == 6
    assert spare(timedelta(seconds=46)) == 16
    assert spare(timedelta(seconds=106)) == 26


def test_an_interval_ends_where_the_next_of_its_length_begins():
    assert interval_end(TEN_A_MINUTE, NOON) == NOON + MINUTE
    assert interval_end(TEN_A_MINUTE, NOON - timedelta(microseconds=1)) == NOON


# Limits and pauses


def test_a_limit_set_at_run_time_holds_until_it_is_set_back(store):
    store.set_rate_limiting("flights", RateLimiting(allowed_messages=2, interval=MINUTE))
    assert store.take("flights", TEN_A_MINUTE, 5).messages == 2
    assert store.rate_limiting("flights", TEN_A_MINUTE).allowed_messages == 2

    store.set_rate_limiting("flights", None)
    assert store.rate_limiting("flights", TEN_A_MINUTE) == TEN_A_MINUTE
    assert store.take("flights", TEN_A_MINUTE, 50).messages == 8, "what was taken before counts"


def test_a_lower_limit_takes_nothing_back(store):
    store.take("flights", TEN_A_MINUTE, 9)
    store.set_rate_limiting("flights", RateLimiting(allowed_messages=2, interval=MINUTE))

    assert store.take("flights", TEN_A_MINUTE, 1).messages == 0
    assert store.spare("flights", TEN_A_MINUTE, timedelta(0)) == 0


def test_a_limit_can_be_set_for_a_pipeline_without_one(store):
    store.set_rate_limiting("flights", TEN_A_MINUTE)
    assert store.take("flights", None, 11).messages == 10


def test_changing_the_length_and_back_opens_no_interval_anew(store):
    store.take("flights", TEN_A_MINUTE, 10)
    store.set_rate_limiting("flights", RateLimiting(allowed_messages=10, interval=timedelta(seconds=1)))
    store.take("flights", TEN_A_MINUTE, 10)
    store.set_rate_limiting("flights", None)

    assert store.take("flights", TEN_A_MINUTE, 1).messages == 0


def test_a_part_of_a_limit_can_be_changed(store):
    store.update_rate_limiting("flights", TEN_A_MINUTE, allowed_messages=3)
    after = store.update_rate_limiting("flights", TEN_A_MINUTE, interval=timedelta(seconds=1))

    assert after == RateLimiting(allowed_messages=3, interval=timedelta(seconds=1))
    assert store.rate_limiting("flights", TEN_A_MINUTE) == after


def test_a_change_of_nothing_or_to_nothing_is_refused(store):
    with pytest.raises(ValueError, match="flights has no rate_limiting to change"):
        store.update_rate_limiting("flights", None, allowed_messages=3)
    with pytest.raises(ValueError, match="allowed_messages"):
        store.update_rate_limiting("flights", TEN_A_MINUTE, allowed_messages=0)
    assert store.rate_limiting("flights", TEN_A_MINUTE) == TEN_A_MINUTE


def test_a_pause_lasts_until_it_is_resumed_and_says_why(store):
    assert store.paused("flights") is None
    store.resume("flights")
    store.pause("flights", "the lake is full")
    store.set_rate_limiting("flights", TEN_A_MINUTE)
    assert store.paused("flights") == "the lake is full"
    assert store.paused("trains") is None
    store.resume("flights")
    assert store.paused("flights") is None


def test_a_pause_without_a_reason_is_a_pause(store):
    store.pause("flights", "")
    assert store.paused("flights")


# Receives


@pytest.fixture
def claim(store):
    return partial(store.claim, "flights", run_id="run", capacity=100, lease_s=60)


def test_claims_share_the_capacity(claim):
    assert [claim(receive_id="a", wanted=70), claim(receive_id="b", wanted=70), claim(receive_id="c", wanted=70)] == [
        70,
        30,
        0,
    ]


def test_what_is_in_flight_is_listed(store, clock, claim):
    claim(receive_id="a", wanted=70)
    clock.now += 1
    claim(receive_id="b", wanted=10, run_id="other")

    first, second = store.in_flight("flights")
    assert first == ("a", "run", 70, NOON + MINUTE, NOON)
    assert (second.receive_id, second.run_id, second.messages) == ("b", "other", 10)
    assert store.in_flight("trains") == store.over("flights") == []


def test_what_was_not_leased_is_given_back_and_never_taken(store, claim):
    claim(receive_id="a", wanted=100)
    store.adjust("a", 40)
    store.adjust("a", 90)

    assert store.in_flight("flights")[0].messages == 40
    assert claim(receive_id="b", wanted=100) == 60


def test_a_claim_again_replaces_the_former(store, claim):
    claim(receive_id="a", wanted=70)
    assert claim(receive_id="a", wanted=90, run_id="again") == 90
    assert [(c.run_id, c.messages) for c in store.in_flight("flights")] == [("again", 90)]


def test_a_receive_stays_with_its_pipeline(store, claim):
    claim(receive_id="a", wanted=70)
    with pytest.raises(ValueError, match="receive a belongs to pipeline flights, not trains"):
        store.claim("trains", "a", "run", wanted=1, capacity=1, lease_s=1)


def test_a_claim_ends_once(store, claim):
    claim(receive_id="a", wanted=100)
    assert store.end("a")
    assert not store.end("a")
    assert not store.beat("a", 60)
    assert claim(receive_id="b", wanted=100) == 100


def test_a_claim_whose_lease_is_over_leaves_its_room_to_others(store, clock, claim):
    claim(receive_id="a", wanted=100)
    clock.now += 60

    assert store.in_flight("flights") == []
    assert [over.receive_id for over in store.over("flights")] == ["a"]
    assert claim(receive_id="b", wanted=10) == 10
    assert not store.beat("a", 60), "100 and 10 are more than the capacity"


def test_a_beat_keeps_a_claim_alive(store, clock, claim):
    claim(receive_id="a", wanted=100)
    for _ in range(5):
        clock.now += 50
        assert store.beat("a", 60)
    assert claim(receive_id="b", wanted=10) == 0


def test_a_late_beat_finds_the_room_that_nobody_took(store, clock, claim):
    claim(receive_id="a", wanted=70)
    clock.now += 3600
    assert claim(receive_id="b", wanted=30) == 30
    assert store.beat("a", 60)
    assert claim(receive_id="c", wanted=1) == 0


def test_clearing_up_ends_only_what_is_still_over(store, clock, claim):
    claim(receive_id="a", wanted=70)
    clock.now += 60
    assert store.over("flights")
    store.beat("a", 60)

    assert not store.end("a", if_over=True)
    clock.now += 60
    assert store.end("a", if_over=True)


receives = st.sampled_from("abcd")
amounts = st.integers(0, 12)
steps = st.one_of(
    st.tuples(st.just("claim"), receives, amounts),
    st.tuples(st.just("adjust"), receives, amounts),
    st.tuples(st.just("beat"), receives, st.integers(1, 5)),
    st.tuples(st.just("end"), receives, st.booleans()),
    st.tuples(st.just("pass"), st.just(""), st.integers(1, 4)),
)


@one_store_for_all_examples
@given(steps=st.lists(steps, max_size=40), capacity=st.integers(0, 20))
def test_claims_never_exceed_the_capacity(store, clock, steps, capacity):
    """Against a model: by receive, its messages and when it is over."""
    pipeline, model = next(_names), {}

    def live(but=""):
        return sum(held for name, (held, over) in model.items() if name != but and over > clock.now)

    for step, receive, number in steps:
        name = f"{pipeline}_{receive}"
        if step == "claim":
            granted = store.claim(pipeline, name, "run", wanted=number, capacity=capacity, lease_s=3)
            assert granted == max(0, min(number, capacity - live(but=name)))
            model.pop(name, None)
            if granted:
                model[name] = (granted, clock.now + 3)
        elif step == "adjust":
            store.adjust(name, number)
            if name in model:
                model[name] = (min(model[name][0], number), model[name][1])
        elif step == "beat":
            alive = name in model and (model[name][1] > clock.now or live(but=name) + model[name][0] <= capacity)
            assert store.beat(name, number) == alive
            if alive:
                model[name] = (model[name][0], clock.now + number)
        elif step == "end":
            if name in model and (not number or model[name][1] <= clock.now):
                assert store.end(name, if_over=number)
                del model[name]
            else:
                assert not store.end(name, if_over=number)
        else:
            clock.now += number
        in_flight = store.in_flight(pipeline)
        assert sum(claim.messages for claim in in_flight) == live() <= capacity
        assert len(in_flight) + len(store.over(pipeline)) == len(model)


@one_store_for_all_examples
@given(
    takes=st.lists(st.tuples(st.integers(1, 8), st.floats(0, 20)), max_size=30),
    allowed=st.integers(1, 12),
)
def test_what_an_interval_grants_is_all_it_has_or_all_that_was_wanted(store, clock, takes, allowed):
    pipeline, limit = next(_names), RateLimiting(allowed_messages=allowed, interval=timedelta(seconds=7))
    wanted_of, granted_of = {}, {}
    for wanted, passed in takes:
        clock.now = round(clock.now + passed, 6)
        grant = store.take(pipeline, limit, wanted)
        ends_at = round(clock.now + grant.seconds, 6)
        assert ends_at == interval_end(limit, datetime.fromtimestamp(clock.now, UTC)).timestamp()
        wanted_of[ends_at] = wanted_of.get(ends_at, 0) + wanted
        granted_of[ends_at] = granted_of.get(ends_at, 0) + grant.messages
        assert granted_of[ends_at] == min(allowed, wanted_of[ends_at])
        assert store.spare(pipeline, limit, timedelta(0)) == allowed - granted_of[ends_at]


# Several processes


def _contend(store: ControlStore, worker: int) -> tuple[int, int, int]:
    limit = RateLimiting(allowed_messages=200, interval=MINUTE)
    taken = sum(store.take("flights", limit, 3).messages for _ in range(40))
    claims = [
        store.claim("flights", f"{worker}_{number}", "run", wanted=7, capacity=200, lease_s=60) for number in range(20)
    ]
    alive = sum(store.beat(f"{worker}_{number}", 60) for number in range(20))
    return taken, sum(claims), alive - sum(1 for granted in claims if granted)


def test_processes_that_start_and_ask_at_once_share_exactly_what_there_is(url):
    """Each makes the tables, or finds them; time stands still, so that all ask for one interval."""
    store = ControlStore(url, now=noon)
    with ProcessPoolExecutor(4, mp_context=PROCESSES) as pool:
        taken, claimed, lost = zip(*pool.map(_contend, [store] * 4, range(4)), strict=True)

    assert sum(taken) == 200
    assert sum(claimed) == 200
    assert lost == (0, 0, 0, 0)


def test_threads_share_a_store_from_its_first_use(url):
    store, together = ControlStore(url, now=noon), threading.Barrier(8)

    def take(_):
        together.wait()
        return sum(store.take("flights", TEN_A_MINUTE, 1).messages for _ in range(3))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 10
    store.close()


def test_claims_and_beats_at_the_same_moment_take_turns(url):
    store, together = ControlStore(url, now=noon), threading.Barrier(8)

    def claim(worker):
        granted = 0
        for number in range(12):
            together.wait()
            granted += store.claim(f"pipeline_{number}", f"{worker}_{number}", "run", wanted=9, capacity=40, lease_s=1)
            store.beat(f"{worker}_{number}", 60)
        return granted

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(claim, range(8))) == 12 * 40
    store.close()


def test_takes_at_the_same_moment_take_turns(url):
    store, together = ControlStore(url, now=noon), threading.Barrier(8)

    def take(_):
        taken = 0
        for number in range(12):
            together.wait()
            taken += store.take(f"pipeline_{number}", TEN_A_MINUTE, 3).messages
        return taken

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 12 * 10, "none too many, and none refused while some are left"
    store.close()


def test_a_store_can_be_used_on_both_sides_of_a_fork(url):
    store = ControlStore(url, now=noon)
    store.take("flights", TEN_A_MINUTE, 1)
    child = multiprocessing.get_context("fork").Process(target=store.take, args=("flights", TEN_A_MINUTE, 2))
    child.start()
    child.join(30)

    assert child.exitcode == 0
    assert store.take("flights", TEN_A_MINUTE, 10).messages == 7
    store.close()


def test_a_pickled_store_is_the_same_store(url):
    store = ControlStore(url)
    store.pause("flights", "why")

    assert pickle.loads(pickle.dumps(store)).paused("flights") == "why"
    store.close()


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_times_are_those_of_the_clock_that_all_share(backend, request, tmp_path):
    url = request.getfixturevalue("postgres_url") if backend == "postgres" else f"sqlite:///{tmp_path}/control.db"
    store = ControlStore(url)
    before = datetime.now(UTC)
    store.claim("flights", "a", "run", wanted=1, capacity=1, lease_s=60)
    after = datetime.now(UTC)

    (claim,) = store.in_flight("flights")
    # The test's server lives on this machine; a millisecond for rounding.
    assert before - timedelta(milliseconds=1) <= claim.started_at <= after + timedelta(milliseconds=1)
    assert claim.expires_at - claim.started_at == MINUTE
    store.close()


# Errors


def test_a_password_in_the_query_is_shown_nowhere():
    store = ControlStore("postgresql://127.0.0.1:1/control?user=tests&password=s3cret")

    with pytest.raises(ControlStoreError) as error:
        store.pause("flights", "why not")
    assert "s3cret" not in f"{error.value} {store!r}"


def test_a_claim_beats_for_the_run_that_works_on_it_alone(store):
    store.claim("flights", "a", "one", wanted=10, capacity=10, lease_s=60)
    assert store.beat("a", 60, run_id="one")

    store.claim("flights", "a", "two", wanted=10, capacity=10, lease_s=60)
    assert not store.beat("a", 60, run_id="one")
    assert store.beat("a", 60, run_id="two")
    assert store.beat("a", 60)


def test_a_password_is_shown_nowhere():
    store = ControlStore("postgresql://tests:s3cret@127.0.0.1:1/control")

    assert "s3cret" not in repr(store)
    with pytest.raises(ControlStoreError, match=r"the control store postgresql\+psycopg://tests:\*\*\*@") as error:
        store.paused("flights")
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "because"),
    [
        ("nonsense:s3cret", "cannot be read; give sqlite"),
        ("mysql://root:s3cret@host/db", "give SQLite or PostgreSQL"),
        ("sqlite://", "a new database in every process"),
        ("sqlite:///:memory:", "a new database in every process"),
    ],
)
def test_a_url_that_cannot_serve_is_refused(url, because):
    with pytest.raises(ControlStoreError, match=because) as error:
        ControlStore(url)
    assert "s3cret" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ControlStoreError, match=r"cannot be used: unable to open .*may this user write to it"):
        ControlStore(f"sqlite:///{tmp_path}/file/control.db").paused("flights")


def test_a_relative_path_stays_where_it_was_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ControlStore("sqlite:///control.db")
    monkeypatch.chdir("/")
    store.pause("flights", "why")

    assert (tmp_path / "control.db").exists()
