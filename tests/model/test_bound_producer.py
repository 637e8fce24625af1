"""A producer with its pipeline, and the whole pipeline of several producers."""

import pytest

from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Producer
from pipeline_platform.model.strict_options import PipelineError
from tests.fixtures.pipelines_under_test import Coasts, Told

EAST, WEST = (BoundProducer(Coasts, name) for name in ("east", "west"))


def test_a_pipeline_has_one_producer_or_several_by_name():
    only = BoundProducer(Told)
    assert BoundProducer.all_of(Told) == (only,)
    assert (only.options, only.source, only.option) == (Told.producer, Told.producer.source, "producer")
    assert BoundProducer.all_of(Coasts) == (EAST, WEST)
    assert (EAST.options, EAST.option) == (Coasts.producers["east"], "producers['east']")


def test_a_subclass_may_replace_the_producer_of_its_base_by_producers_and_vice_versa():
    assert [producer.name for producer in BoundProducer.all_of(Coasts)] == ["east", "west"], "its base has a producer"
    again = type("Again", (Coasts,), {"name": "again", "producer": Producer(source="queue"), "producers": {}})
    assert [producer.name for producer in BoundProducer.all_of(again)] == [""]


def test_the_key_of_the_only_producer_is_the_pipeline_s():
    assert (BoundProducer(Told).key, BoundProducer(Coasts).key, EAST.key) == ("told", "coasts", "coasts/east")
    assert EAST.prefix == "coasts_east", "Dagster allows no slash in the name of a sensor"


def test_the_whole_pipeline_has_producers_and_no_options():
    whole = BoundProducer(Coasts)
    assert (whole.is_whole_pipeline, whole.each) == (True, (EAST, WEST))
    assert (EAST.is_whole_pipeline, EAST.each) == (False, (EAST,))
    assert not BoundProducer(Told).is_whole_pipeline
    with pytest.raises(PipelineError, match=r"^coasts: has several producers\. Name one of east, west\.$"):
        _ = whole.options
