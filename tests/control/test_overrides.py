"""Options changed at run time: their scope, and invalid changes."""

import pytest

from pipeline_platform.control.quota import Quota
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Overrides, Processors, Producer
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.orchestration.limits_job import LimitsConfig, change
from tests.fixtures.control import on_both_databases
from tests.fixtures.pipelines_under_test import Coasts, Told


@on_both_databases
def test_changed_options_apply_until_they_are_reset(store):
    store.override(Told, Overrides(concurrency=5, max_runs=3))
    assert store.override(Told, Overrides(max_demand=7)) == Overrides(concurrency=5, max_demand=7, max_runs=3)
    assert (store.processors_of(Told).per_run, Quota(BoundProducer(Told), store).capacity) == (35, 105)
    assert store.options_of(BoundProducer(Told)).oldest_allowed == Told.producer.oldest_allowed, (
        "all else is the class's own"
    )
    store.reset_overrides(Told)
    assert store.processors_of(Told) is Told.processors
    assert store.options_of(BoundProducer(Told)) is Told.producer


def test_each_producer_has_runs_of_its_own_and_the_pipeline_its_tasks(store):
    store.override(Coasts, Overrides(max_runs=9), "east")
    store.override(Coasts, Overrides(concurrency=1))
    assert [store.options_of(BoundProducer(Coasts, name)).max_runs for name in ("east", "west")] == [9, 1]
    assert [Quota(BoundProducer(Coasts, name), store).capacity for name in ("east", "west", "")] == [450, 50, 500]
    store.reset_overrides(Coasts)
    assert store.options_of(BoundProducer(Coasts, "east")).max_runs == 2
    assert store.processors_of(Coasts) is Coasts.processors


@pytest.mark.parametrize(
    ("changes", "producer", "said"),
    [
        (Overrides(max_runs=2), "", "max_runs applies to a single producer. Name one of east, west"),
        (Overrides(concurrency=2), "east", "concurrency and max_demand apply to the whole pipeline. Omit producer"),
    ],
)
def test_an_option_of_another_is_refused(store, changes, producer, said):
    with pytest.raises(PipelineError, match=said):
        store.override(Coasts, changes, producer)
    assert store.overrides(BoundProducer(Coasts, producer).key) == Overrides()


def test_a_min_demand_that_would_have_every_look_start_a_run_counts_as_unset():
    own = Processors(concurrency=1, max_demand=100, min_demand=80)
    assert Overrides(max_demand=50).processors(own).worthwhile == 25
    assert Overrides(max_demand=90).processors(own).worthwhile == 10
    assert Overrides().producer(own := Producer(source="queue")) is own


# In the UI


def test_the_ui_s_job_refuses_a_limit_of_several_producers_before_it_changes_anything(store):
    with pytest.raises(PipelineError, match=r"rate limit per producer.*east, west"):
        change(Coasts, store, LimitsConfig(allowed_messages=5, interval_s=1.0, concurrency=1), print)
    assert store.overrides("coasts") == Overrides()
