"""The sensors of a pipeline whose runs take turns: none asks for a run that would only wait."""

from typing import Any

import pytest

from pipeline_platform.model.options import Producer
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.sensor import Place


class InTurn(Told):
    """By the source's partition, which a table queue shares out unless told otherwise."""

    name = "in_turn"
    producer = Producer(source="queue", max_runs=3)
    partition_by = "source"


def claim(place: Place, **options: Any) -> None:
    place.control.claim("in_turn", "a", "other", wanted=1, capacity=300, lease_s=60, **options)


@pytest.mark.parametrize("alone", [True, False])
def test_no_run_is_asked_for_beside_another(place: Place, alone: bool) -> None:
    place.enqueue(70)
    claim(place, alone=alone)

    assert place.skips(InTurn) == "run other is under way, and runs take turns: messages keep their order"
    place.control.end("a")
    assert place.asked(InTurn) == [70]


def test_one_run_is_asked_for_at_a_time(place: Place) -> None:
    place.enqueue(250)

    assert place.asked(InTurn) == [100]


def test_a_source_that_leases_partitions_is_pulled_from_side_by_side_but_not_beside_a_backfill(place: Place) -> None:
    options = {"partition_column": "customer", "one_receive_per_partition": True}
    apart = place.queue.model_copy(update={"name": "apart", "table": "apart", **options})
    apart.create()
    apart.enqueue((b"x" for _ in range(250)), ({"customer": str(n)} for n in range(250)))

    claim(place, alone=True)
    assert "runs take turns" in str(place.tick(InTurn, apart).skip_message)
    place.control.end("a")
    claim(place)
    assert len(place.tick(InTurn, apart).run_requests) == 2
