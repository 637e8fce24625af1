"""Several producers in one pipeline: what a class and a deployment may say of them."""

from typing import Any

import pytest

from pipeline_platform.deployment import platform_definitions
from pipeline_platform.model.options import PipelineError, Producer
from pipeline_platform.model.pipeline import Pipeline
from tests.fixtures.jobs_under_test import resources_at
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


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        (
            {"producer": EAST, "producers": {"west": WEST}},
            (
                "Flights.producer is 'both': write either producer or producers; "
                "what a base sets is unset by producer = None or producers = {}"
            ),
        ),
        ({}, "Flights.producer is None: it must be a Producer(...), or producers a dict of them by name"),
        (
            {"producers": {}},
            "Flights.producer is None: it must be a Producer(...), or producers a dict of them by name",
        ),
        ({"producers": [EAST]}, "producers is [Producer("),
        (
            {"producers": {"East": EAST}},
            "Flights.producers is 'East': not the name of a producer: [a-z][a-z0-9_]*, for",
        ),
        ({"producers": {"": EAST}}, "Flights.producers is '': not the name of a producer"),
        ({"producers": {"east": "queue"}}, "Flights.producers['east'] is 'queue': it must be a Producer(...)"),
        ({"producer": EAST, "producrs": {}}, "did you mean the option 'producers'?"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_the_class_is_built(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError) as refused:
        build(**attributes)

    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("pipeline", "name", "words"),
    [
        (Coasts, "eats", "coasts: no producer has the name 'eats'; did you mean 'east'?"),
        (Coasts, "north", "coasts: no producer has the name 'north'; there is east, west"),
        (Told, "east", "told: no producer has the name 'east'; its only one has no name: give none"),
    ],
)
def test_a_name_that_no_producer_has_is_refused_with_those_there_are(
    pipeline: type[Pipeline], name: str, words: str
) -> None:
    with pytest.raises(PipelineError) as refused:
        pipeline.producers_of(name)

    assert str(refused.value) == words


# Side by side

ONE_OF_TWO = (
    ", and each message would come to one of the two: give each a source of its own, or handle both kinds in one "
    "pipeline, by batcher"
)


@pytest.mark.parametrize(
    ("producers", "beside", "words"),
    [
        (
            {"east": EAST, "west": Producer(source="queue", max_runs=2)},
            (),
            f"Flights.producers['west'].source is 'queue': Flights.producers['east'] pulls from it too{ONE_OF_TWO}",
        ),
        ({"east": EAST}, (Told,), f"Flights.producers['east'].source is 'queue': Told pulls from it too{ONE_OF_TWO}"),
        (
            {"north": Producer(source="north_queue"), "west": WEST},
            (Coasts,),
            (
                "Flights.producers['west'].source is 'beside_queue': Coasts.producers['west'] pulls from it too"
                f"{ONE_OF_TWO}"
            ),
        ),
        (
            {"east": Producer(source="again_queue")},
            (Told,),
            f"Flights.producers['east'].source is 'again_queue': it equals 'queue', from which Told pulls{ONE_OF_TWO}",
        ),
        (
            {"east": EAST, "north": Producer(source="same_queue")},
            (),
            (
                "Flights.producers['north'].source is 'same_queue': that source has the name 'queue', and so has the "
                "source of Flights.producers['east']: messages, and positions in a log, are known by it, so give each "
                "source a name of its own"
            ),
        ),
        (
            {"east": Producer(source="nort_queue")},
            (),
            "Flights.producers['east'].source is 'nort_queue': no resource has this key; did you mean 'north_queue'?",
        ),
    ],
    ids=[
        "two producers",
        "with another pipeline",
        "with another's producer",
        "equal sources",
        "equal names",
        "no source",
    ],
)
def test_two_on_one_source_are_refused_when_definitions_load(
    producers: dict[str, Producer], beside: tuple[type[Pipeline], ...], words: str
) -> None:
    resources = resources_at("nowhere", "nowhere")
    for key, options in (
        ("again_queue", {}),
        ("same_queue", {"table": "another"}),
        ("north_queue", {"name": "north", "table": "north"}),
    ):
        resources[key] = resources_at("nowhere", "nowhere", **options)["queue"]

    with pytest.raises(PipelineError) as refused:
        platform_definitions([*beside, build(producers=producers)], resources)

    assert str(refused.value) == words


def test_two_pipelines_whose_sensors_would_have_one_name_are_refused() -> None:
    resources = resources_at("nowhere", "nowhere")
    alike = type("Alike", (Told,), {"name": "flights_east", "producer": WEST})

    with pytest.raises(PipelineError) as refused:
        platform_definitions([build(producers={"east": EAST}), alike], resources)

    said = "Flights.producers['east'] has sensors of the same name, flights_east_...: rename one"
    assert str(refused.value) == f"Alike.producer is 'flights_east': {said}"
