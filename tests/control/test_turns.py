"""Exclusive claims, for messages in order over runs."""

from functools import partial

import pytest

from tests.fixtures.control import on_both_databases


@pytest.fixture
def claim(store):
    return partial(store.claim, run_id="run", wanted=10, capacity=100, lease_s=60)


@on_both_databases
def test_a_claim_alone_gets_nothing_beside_another_and_leaves_nothing_to_others(store, claim):
    assert claim("flights", "a") == 10
    assert claim("flights", "b", alone=True) == 0
    store.end("a")
    assert claim("flights", "b", alone=True) == 10
    assert [claim("flights", "c"), claim("flights", "d", alone=True), claim("trains", "e", alone=True)] == [0, 0, 10]
    assert [claim.alone for claim in store.in_flight("flights")] == [True]
    store.end("b")
    assert claim("flights", "c") == 10


def test_a_claim_alone_is_so_beside_those_of_all_producers(claim):
    assert claim("coasts/east", "a", alone=True) == 10
    assert [claim("coasts/west", "b", alone=True), claim("coasts", "c")] == [0, 0]
    assert claim("coasts_2/west", "b", alone=True) == 10


def test_a_claim_alone_again_replaces_the_former(claim):
    assert [claim("flights", "a", alone=True), claim("flights", "a", alone=True)] == [10, 10]


@on_both_databases
def test_an_expired_exclusive_claim_is_not_restored_beside_a_live_claim(store, clock, claim):
    claim("flights", "a", alone=True)
    clock.now += 61
    assert claim("flights", "b", alone=True) == 10
    assert not store.beat("a", 60)
    store.end("b")
    assert store.beat("a", 60)
    assert claim("flights", "b") == 0
