"""Several producers in one pipeline: what a class and a deployment may say of them."""

from typing import Any

from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from tests.fixtures.pipelines_under_test import Coasts, Told

EAST, WEST = Producer(source="queue"), Producer(source="beside_queue")


def build(**attributes: Any) -> type[Pipeline]:
    handle = {"handle_message": lambda self, message, context: message}
    return type("Flights", (Pipeline,), {"name": "flights", **handle, **attributes})


def test_a_pipeline_has_one_producer_or_several_by_name() -> None:
    assert dict(build(producer=EAST).producers_of()) == {"": EAST}
    several = build(producers={"east": EAST, "west": WEST})
    assert dict(several.producers_of()) == {"east": EAST, "west": WEST}
    assert dict(several.producers_of("west")) == {"west": WEST}


def test_one_may_be_put_in_the_place_of_the_other_of_a_base() -> None:
    assert [*Coasts.producers_of()] == ["east", "west"], "its base has a producer"
    again = type("Again", (Coasts,), {"name": "again", "producer": EAST, "producers": {}})
    assert [*again.producers_of()] == [""]


def test_limits_of_the_only_producer_are_the_pipeline_s() -> None:
    assert Told.limits_key() == "told"
    assert (Coasts.limits_key(), Coasts.limits_key("east")) == ("coasts", "coasts/east")
