"""Receives whose manifests another run removes while their own run decides them."""

from collections.abc import Callable

import pytest

from pipeline_platform.lake.decisions.decision import FencedError, decide, fence
from pipeline_platform.lake.decisions.ledger import Ledger
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from tests.fixtures.small_lake import Keeping, Memory, Run, numbered, visible


@pytest.fixture
def tables(tmp_path):
    return Tables(Lake(root=str(tmp_path)), Keeping)


def handled(tables: Tables, receive_id: str, *payloads: bytes) -> Run:
    return Run(tables, Memory(deliveries_=numbered(*payloads)), receive_id).work()


def half_remove(tables: Tables, step: str) -> None:
    """Remove the record of r0 and the manifest of one step, as a removal has half-way."""
    for name in ("receive.json", f"{step}.parquet"):
        tables.lake.remove_file(f"keeping/_receives/r0/{name}")


def decide_during(run: Run, *meanwhile: Callable[[], object]) -> None:
    """Let others act between a look and the swap after it, once for each try."""
    actions = iter(meanwhile)

    def still_ours() -> bool:
        next(actions)()
        return True

    # A ledger that has read no manifest yet, as a step in a process of its own has.
    decide(run.tables, Ledger(run.tables.lake, "keeping"), run.receive, still_ours)


@pytest.mark.parametrize("step", ["receive", "handle"])
def test_a_run_whose_receive_is_given_up_while_it_reads_the_manifests_is_fenced(tables, step):
    run = handled(tables, "r0", b"one", b"fail")

    def give_up() -> None:
        assert fence(tables, run.receive) is None
        half_remove(tables, step)

    with pytest.raises(FencedError, match="receive r0: fenced"):
        decide_during(run, give_up)

    assert visible(tables, "outcomes") == []


def test_a_run_whose_receive_is_given_up_while_it_drops_what_others_decided_is_fenced(tables):
    run = handled(tables, "r0", b"one", b"two", b"three")
    first, second = handled(tables, "r1", b"one"), handled(tables, "r2", b"one", b"two")
    first.decide()

    def give_up() -> None:
        assert fence(tables, run.receive) is None
        half_remove(tables, "handle")

    with pytest.raises(FencedError, match="receive r0: fenced"):
        decide_during(run, second.decide, give_up)

    assert {row["receive_id"] for row in visible(tables, "outcomes")} == {"r1", "r2"}
