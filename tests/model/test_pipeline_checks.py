"""Checks of a pipeline's class: mistakes are refused by name, and valid classes are accepted."""

import functools
from datetime import timedelta

import pytest

from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from tests.fixtures.built import build
from tests.fixtures.mistakes import LANE, Callback, four, given_more, run_to_its_end, three, two, waits
from tests.fixtures.small_lake import Row


class Helped:
    """A base with helpers and constants of an author."""

    PROCESSORS = 3
    _processors = 3
    threshold = 0.5

    @property
    def interval(self):
        return 5

    def source(self):
        return "JFK"

    def parse(self, data):
        return data


class Initialised:
    def __init__(self, limit=3, **more):
        self.limit = limit


@pytest.mark.parametrize(
    ("bases", "attributes"),
    [
        ((Helped,), {}),
        ((Initialised,), {}),
        ((), {"handle_message": lambda self, *args: args[0]}),
        ((), {"handle_message": lambda *args, **kwargs: args[1]}),
        ((), {"handle_message": lambda self, message, context=None, more=3: message}),
        ((), {"handle_message": staticmethod(lambda message, context: message)}),
        ((), {"handle_message": classmethod(lambda cls, message, context: message)}),
        ((), {"handle_message": functools.partialmethod(three, more=3)}),
        ((), {"handle_message": functools.lru_cache(two)}),
        ((), {"handle_message": given_more(three)}),
        ((), {"handle_message": run_to_its_end(waits)}),
        ((), {"handle_message": Callback()}),
        ((), {"handle_message": property(lambda self: Callback())}),
        ((), {**LANE, "handle_failed": two, "processors": Processors(message_timeout=timedelta(seconds=5))}),
        ((), {**LANE, "handle_failed": two, "handle_batch": four, "batchers": {"b": Batcher()}}),
    ],
)
def test_valid_classes_are_accepted(bases, attributes):
    assert build(*bases, **attributes).name == "p"


OWN = """
max_age max_rows max_size max_run_s max_retries max_batches max_messages min_size min_delay batch_rows
batch_count batch_limit batch_sleep chunk_rows chunk_count message_bytes message_limit message_timeout_s
allowed_carriers rate_limit sources threshold schedules interval_s backoff_s patience_s oldest duplicates_for
"""


def test_other_attributes_are_accepted():
    for name in OWN.split():
        assert build(**{name: 3})
        assert build(**{name: timedelta(seconds=3)})


def test_a_similar_name_with_a_value_of_another_type_is_accepted():
    assert build(batch_sizes={"small": 3}, max_run=lambda self: 3)


def test_a_mistake_in_a_shared_base_is_refused_with_the_name_of_the_base():
    class Base(Pipeline, abstract=True):
        producer = Producer(source="s")
        retension = None

    with pytest.raises(PipelineError, match=r"Base\.retension: .* Did you mean the option 'retention'"):
        build(Base)


def test_a_base_may_have_handle_batch_for_some_of_its_pipelines():
    class Base(Pipeline, abstract=True):
        handle_batch = four

    assert build(Base, batchers={"lake": TableBatcher(schema=Row)})
    assert build(Base, batchers={"lake": Batcher()})
