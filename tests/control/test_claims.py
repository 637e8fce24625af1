"""Claims: they share the capacity, expire, and are renewed and ended."""

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.control.claims import KEEP_ENDED
from pipeline_platform.control.limits import lock
from pipeline_platform.control.store import ControlStore
from tests.fixtures.control import MINUTE, NOON, names, on_both_databases, one_store_for_all_examples


@pytest.fixture
def claim(store):
    return partial(store.claim, "flights", run_id="run", capacity=100, lease_s=60)


@on_both_databases
def test_live_claims_are_listed(store, clock, claim):
    claim(receive_id="a", wanted=70)
    clock.now += 1
    claim(receive_id="b", wanted=10, run_id="other")
    first, second = store.in_flight("flights")
    assert first == ("a", "run", 70, NOON + MINUTE, NOON, False)
    assert (second.receive_id, second.run_id, second.messages) == ("b", "other", 10)
    assert store.in_flight("trains") == store.over("flights") == []


@on_both_databases
def test_a_receive_stays_with_its_pipeline(store, claim):
    claim(receive_id="a", wanted=70)
    with pytest.raises(ValueError, match="belongs to pipeline flights, not to trains"):
        store.claim("trains", "a", "run", wanted=1, capacity=1, lease_s=1)


@on_both_databases
def test_a_finished_run_leaves_its_receives_to_the_next_run_and_no_other_claim(store, claim):
    claim(receive_id="a", wanted=70)
    store.stand_by("flights", "run", 60)
    store.let_go("run")
    assert store.in_flight("flights") == []
    assert [claim.receive_id for claim in store.over("flights")] == ["a"]


@on_both_databases
def test_acknowledged_receives_are_kept_for_some_days(store, clock, claim):
    claim(receive_id="a", wanted=70)
    store.adjust("a", 40)
    clock.now += 5
    store.finish("a")
    clock.now += 1
    store.claim("flights/east", "b", "run", wanted=1, capacity=1, lease_s=60)
    store.finish("b")
    assert store.in_flight("flights", of_all=True) == []
    ended = {key: [each.receive_id for each in store.ended(key, last=5)] for key in ("flights", "flights/east")}
    assert ended == {"flights": ["a"], "flights/east": ["b"]}
    assert [each.receive_id for each in store.ended("flights", receive_ids=["a", "b", "x"])] == ["b", "a"]
    assert store.ended("flights", receive_ids=["a"]) == [("a", "run", 40, NOON, NOON + timedelta(seconds=5))]
    assert store.ended("trains") == []

    clock.now += KEEP_ENDED.total_seconds()
    claim(receive_id="c", wanted=1)
    store.finish("c")
    assert [each.receive_id for each in store.ended("flights")] == ["c"]


def test_acknowledged_receives_are_found_by_an_index(tmp_path):
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    statements: list[str] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "control_ended" in statement and statement.startswith(("SELECT", "DELETE")):
            plan = connection.connection.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            statements.extend(row[3] for row in plan)

    store.ended("flights")
    sa.event.listen(store._engine(), "before_cursor_execute", explain)
    store.ended("flights", since=NOON)
    store.ended("flights", last=500)
    store.ended("flights", receive_ids=["a"])
    store.claim("flights", "a", "run", wanted=1, capacity=1, lease_s=60)
    store.finish("a")

    assert len(statements) > 4
    assert [step for step in statements if "SCAN" in step] == []


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
    """Compare with a model: the messages and the expiry of each receive."""
    pipeline, model = next(names), {}

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


@on_both_databases
def test_only_the_owning_run_can_renew_a_claim(store):
    store.claim("flights", "a", "one", wanted=10, capacity=10, lease_s=60)
    assert store.beat("a", 60, run_id="one")
    store.claim("flights", "a", "two", wanted=10, capacity=10, lease_s=60)
    assert not store.beat("a", 60, run_id="one")
    assert store.beat("a", 60, run_id="two")
    assert store.beat("a", 60)


def test_a_renewal_waits_for_a_concurrent_claim(postgres_url):
    """SQLite has one writer at a time."""
    with closing(ControlStore(postgres_url)) as store, ThreadPoolExecutor() as threads:
        store.claim("flights", "r", "run", wanted=1, capacity=1, lease_s=60)
        with store.writing() as connection:
            lock(connection, "flights")
            beat = threads.submit(store.beat, "r", 60)
            assert wait([beat], timeout=0.5).not_done
        assert beat.result(10)
