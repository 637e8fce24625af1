"""The control store shared by many processes, concurrently and over forks, and its errors."""

import multiprocessing
import pickle
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.model.options import RateLimiting
from tests.fixtures.control import MINUTE, TEN_A_MINUTE, noon, on_both_databases
from tests.fixtures.processes import PROCESSES


def _contend(store: ControlStore, worker: int) -> tuple[int, int, int]:
    limit = RateLimiting(allowed_messages=200, interval=MINUTE)
    taken = sum(store.take({"flights": limit}, 3).messages for _ in range(40))
    claims = [
        store.claim("flights", f"{worker}_{number}", "run", wanted=7, capacity=200, lease_s=60) for number in range(20)
    ]
    alive = sum(store.beat(f"{worker}_{number}", 60) for number in range(20))
    return taken, sum(claims), alive - sum(1 for granted in claims if granted)


@on_both_databases
def test_processes_that_start_and_ask_at_once_share_exactly_what_there_is(control_url):
    """Each process creates or finds the tables. The clock is fixed, so all use the same interval."""
    store = ControlStore(control_url, now=noon)
    with ProcessPoolExecutor(4, mp_context=PROCESSES) as pool:
        taken, claimed, lost = zip(*pool.map(_contend, [store] * 4, range(4)), strict=True)
    assert sum(taken) == 200
    assert sum(claimed) == 200
    assert lost == (0, 0, 0, 0)


@on_both_databases
def test_claims_beats_and_takes_at_the_same_moment_take_turns(control_url):
    store, together = ControlStore(control_url, now=noon), threading.Barrier(8)

    def take_part(worker):
        granted = taken = 0
        for number in range(12):
            together.wait()
            taken += store.take({f"pipeline_{number}": TEN_A_MINUTE}, 3).messages
            granted += store.claim(f"pipeline_{number}", f"{worker}_{number}", "run", wanted=9, capacity=40, lease_s=1)
            store.beat(f"{worker}_{number}", 60)
        return granted, taken

    with ThreadPoolExecutor(8) as pool:
        granted, taken = zip(*pool.map(take_part, range(8)), strict=True)
    assert sum(granted) == 12 * 40
    assert sum(taken) == 12 * 10, "none too many, and none refused while some are left"
    store.close()


@on_both_databases
def test_a_store_can_be_used_on_both_sides_of_a_fork(control_url):
    store = ControlStore(control_url, now=noon)
    store.take({"flights": TEN_A_MINUTE}, 1)
    child = multiprocessing.get_context("fork").Process(target=store.take, args=({"flights": TEN_A_MINUTE}, 2))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert store.take({"flights": TEN_A_MINUTE}, 10).messages == 7
    store.close()


@on_both_databases
def test_a_pickled_store_is_the_same_store(control_url):
    store = ControlStore(control_url)
    store.pause("flights", "why")
    assert pickle.loads(pickle.dumps(store)).paused("flights") == "why"
    store.close()


@on_both_databases
def test_times_are_those_of_the_clock_that_all_share(control_url):
    store = ControlStore(control_url)
    before = datetime.now(UTC)
    store.claim("flights", "a", "run", wanted=1, capacity=1, lease_s=60)
    after = datetime.now(UTC)
    (claim,) = store.in_flight("flights")
    # The server is on this machine; a millisecond allows for rounding.
    assert before - timedelta(milliseconds=1) <= claim.started_at <= after + timedelta(milliseconds=1)
    assert claim.expires_at - claim.started_at == MINUTE
    store.close()


@pytest.mark.parametrize(
    ("url", "because"),
    [
        ("nonsense:s3cret", "is not a valid URL. Use sqlite"),
        ("mysql://root:s3cret@host/db", "must be for SQLite or PostgreSQL"),
        ("sqlite://", "another in-memory database"),
        ("sqlite:///:memory:", "another in-memory database"),
    ],
)
def test_a_url_that_cannot_serve_is_refused(url, because):
    with pytest.raises(ControlStoreError, match=because) as error:
        ControlStore(url)
    assert "s3cret" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ControlStoreError, match=r"cannot be used: unable to open .*this user may write to it"):
        ControlStore(f"sqlite:///{tmp_path}/file/control.db").paused("flights")


def test_a_relative_path_stays_where_it_was_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ControlStore("sqlite:///control.db")
    monkeypatch.chdir("/")
    store.pause("flights", "why")
    assert (tmp_path / "control.db").exists()
