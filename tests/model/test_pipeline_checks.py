"""The class of a pipeline: a slip of the pen is refused by name when it is built, and what may be written passes."""

import asyncio
import functools
from typing import Any

import pytest

from pipeline_platform.deployment import platform_definitions
from pipeline_platform.model.options import Batcher, Producer, Splitter, TableBatcher
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from tests.fixtures.built import build
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.small_lake import Row


def two(self, messages, context):
    return messages


def four(self, batcher, messages, batch_info, context):
    return messages


def three(self, message, context, more):
    return message


async def waits(self, message, context):
    return message


async def waits_and_yields(self, message, context):
    yield message


def yields(self, message, context):
    yield message


class Callback:
    def __call__(self, message, context):
        return message


class AsyncCallback:
    async def __call__(self, message, context):
        return message


def given_more(callback):
    """Call with one argument more than the platform gives."""

    @functools.wraps(callback)
    def wrapper(self, message, context):
        return callback(self, message, context, "more")

    return wrapper


def run_to_its_end(callback):
    """Make a plain method of an async one."""

    @functools.wraps(callback)
    def wrapper(*args, **kwargs):
        return asyncio.run(callback(*args, **kwargs))

    return wrapper


def split_by(step):
    return Batcher(batch_size=Splitter(initial=0, step=step))


LANE = {"handle_message": ..., "handle_messages": two}


OWN = "If it is your own, give it a name less like that one"
STEP = "Flights.batchers['lake'].batch_size.step"
PLAIN = "it must be a plain method, which returns its result itself"


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        (
            {"prosessors": 1},
            (
                "Flights.prosessors is no option or callback; did you mean the option 'processors'? "
                f"{OWN}, or call it _prosessors"
            ),
        ),
        (
            {"handle_fialed": two},
            (
                "Flights.handle_fialed is no option or callback; did you mean the callback 'handle_failed'? "
                f"{OWN}, or call it _handle_fialed"
            ),
        ),
        (
            {"handle_message": ..., "handleMessage": two},
            (
                "Flights.handleMessage is no option or callback; did you mean the callback 'handle_message'? "
                f"{OWN}, or call it _handleMessage"
            ),
        ),
        (
            {"max_runs": 2},
            "Flights.max_runs is an option of Producer(...): give it there, or call one of your own _max_runs",
        ),
        ({"uses_columns": True}, "Flights.uses_columns is a method of the platform's own: give yours another name"),
        (
            {"handle_message": waits},
            f"Flights.handle_message is async: {PLAIN}",
        ),
        (
            {"handle_message": staticmethod(functools.partial(waits, None))},
            f"Flights.handle_message is async: {PLAIN}",
        ),
        (
            {"handle_message": AsyncCallback()},
            f"Flights.handle_message is async: {PLAIN}",
        ),
        (
            {"handle_message": waits_and_yields},
            f"Flights.handle_message is an async generator: {PLAIN}",
        ),
        (
            {"handle_failed": yields},
            f"Flights.handle_failed is a generator: {PLAIN}",
        ),
        (
            {"handle_message": three},
            "Flights.handle_message takes (message, context, more): it is called as handle_message(message, context)",
        ),
        (
            {"handle_failed": lambda self, messages: messages},
            "Flights.handle_failed takes (messages): it is called as handle_failed(messages, context)",
        ),
        (
            {"handle_message": lambda self, message, *, context: message},
            "Flights.handle_message takes (message, *, context): it is called as handle_message(message, context)",
        ),
        ({"transform": two}, "Flights.transform takes (messages, context): it is called as transform(event)"),
        (
            {"handle_message": staticmethod(three)},
            (
                "Flights.handle_message takes (self, message, context, more): "
                "it is called as handle_message(message, context)"
            ),
        ),
        (
            {"handle_message": property(two)},
            "Flights.handle_message is a property: write a plain method, def handle_message(self, message, context)",
        ),
        (
            {"handle_failed": None},
            "Flights.handle_failed is None: it must be a method, def handle_failed(self, messages, context)",
        ),
        ({"__init__": two}, "Flights.__init__ takes (messages, context): the platform gives it none"),
        (
            {**LANE, "transform": lambda self, event: event},
            "Flights.transform is never called beside handle_messages: do it there, or write handle_message instead",
        ),
        (
            {**LANE, "prepare_messages": two},
            (
                "Flights.prepare_messages is never called beside handle_messages: "
                "do it there, or write handle_message instead"
            ),
        ),
        (
            {"handle_batch": four, "batchers": {"lake": TableBatcher(schema=Row)}},
            "Flights.handle_batch is never called: no batcher is a Batcher(...), and a TableBatcher has no callback",
        ),
        (
            {"handle_batch": four, "batchers": {"lake": split_by(three)}},
            f"{STEP} takes (self, message, context, more): it is called as step(message, acc)",
        ),
        (
            {"handle_batch": four, "batchers": {"lake": split_by(functools.partial(waits, None))}},
            f"{STEP} is async: {PLAIN}",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_slip_is_refused_on_one_line_when_the_class_is_built(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError) as refused:
        build(**attributes)

    assert str(refused.value) == words


class Helped:
    """Helpers and constants of an author's own."""

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
        ((), {**LANE, "handle_failed": two, "handle_batch": four, "batchers": {"b": Batcher()}}),
    ],
)
def test_what_an_author_may_write_passes(bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
    assert build(*bases, **attributes).name == "p"


def test_a_slip_in_a_shared_base_is_refused_in_the_name_of_the_base() -> None:
    class Base(Pipeline, abstract=True):
        producer = Producer(source="s")
        retension = None

    with pytest.raises(PipelineError, match=r"Base\.retension is no option or callback; did you mean the option 'ret"):
        build(Base)


def test_a_base_may_have_a_callback_for_those_of_its_pipelines_that_have_batches() -> None:
    class Base(Pipeline, abstract=True):
        handle_batch = four

    assert build(Base, batchers={"lake": TableBatcher(schema=Row)})
    assert build(Base, batchers={"lake": Batcher()})


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        (
            {"name": "told", "producer": Producer(source="other_queue")},
            "Flights.name is 'told': Told has this name too, and tables and limits are by name: rename one",
        ),
        (
            {"producer": Producer(source="queue")},
            (
                "Flights.producer.source is 'queue': Told pulls from it too, and each message would come to one of the "
                "two: give each a source of its own, or handle both kinds in one pipeline, by batcher"
            ),
        ),
        (
            {"producer": Producer(source="other_queu")},
            "Flights.producer.source is 'other_queu': no resource has this key; did you mean 'other_queue'?",
        ),
        (
            {"producer": Producer(source="topic")},
            (
                "Flights.producer.source is 'topic': no resource has this key; "
                "there is beside_queue, control, lake, other_queue, queue, spark"
            ),
        ),
    ],
)
def test_pipelines_that_cannot_stand_side_by_side_are_refused_when_definitions_load(
    attributes: dict[str, Any], words: str
) -> None:
    resources = resources_at("nowhere", "nowhere")
    resources["other_queue"] = resources["queue"]

    with pytest.raises(PipelineError) as refused:
        platform_definitions([Told, build(**attributes)], resources)

    assert str(refused.value) == words


def test_a_pipeline_that_is_named_twice_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"Told\.name is 'told': Told has this name too"):
        platform_definitions([Told, Told], resources_at("nowhere", "nowhere"))
