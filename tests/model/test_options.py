"""Options: what cannot work is refused when the class is built, by option, value and way out."""

from datetime import datetime, timedelta
from threading import Lock

import pytest
from pydantic import BaseModel, ValidationError

from pipeline_platform.model.cron import WAY_OUT, is_cron
from pipeline_platform.model.options import (
    Batcher,
    Processors,
    Producer,
    RateLimiting,
    Retention,
    Splitter,
    TableBatcher,
    shown,
)
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from tests.fixtures.built import build
from tests.fixtures.small_lake import Keeping, Row

SECOND = timedelta(seconds=1)
NO_SUCH = "there is no such option"
THOUSAND, BILLION = "it must be a whole number from 1 to 1,000", 10**9
SIZE = "it must be a whole number from 1 to 1,000,000, or a Splitter(...)"
LOCK = Lock()
COPY = "each batch begins with a copy of it, and it has none"
A_SPAN = "it should be a valid timedelta"
SPAN = "it must be longer than nothing and at most 36,500 days"


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Producer, {"concurency": 2}, f"concurency is 2: {NO_SUCH}; did you mean 'concurrency'?"),
        (RateLimiting, {"per": 1}, f"per is 1: {NO_SUCH}; there is allowed_messages, interval"),
        (TableBatcher, {"table_schema": 1}, f"table_schema is 1: {NO_SUCH}; did you mean 'schema'?"),
        (Producer, {"source": ...}, "source is missing: Key of the resource that is the source."),
        (RateLimiting, {"interval": ...}, "interval is missing: Length of an interval."),
        (TableBatcher, {"schema": ...}, "schema is missing: Model of the data: the table's columns."),
        (Producer, {"source": ""}, "source is '': it should have at least 1 character"),
        (Producer, {"source": 3}, "source is 3: it should be a valid string"),
        (Producer, {"max_runs": 0}, f"max_runs is 0: {THOUSAND}"),
        (Producer, {"max_runs": "3"}, f"max_runs is '3': {THOUSAND}"),
        (Producer, {"max_runs": True}, f"max_runs is True: {THOUSAND}"),
        (Producer, {"max_runs": 3.0}, f"max_runs is 3.0: {THOUSAND}"),
        (Producer, {"concurrency": BILLION}, f"concurrency is 1000000000: {THOUSAND}"),
        (Processors, {"concurrency": BILLION}, "concurrency is 1000000000: it must be a whole number from 1 to 10,000"),
        (Processors, {"min_demand": -1}, "min_demand is -1: it must be a whole number from 0 to 100,000,000"),
        (Batcher, {"batch_size": 0}, f"batch_size is 0: {SIZE}"),
        (Batcher, {"batch_size": 10**6 + 1}, f"batch_size is 1000001: {SIZE}"),
        (Batcher, {"batch_size": True}, f"batch_size is True: {SIZE}"),
        (Batcher, {"batch_size": (0, max)}, f"batch_size is (0, <built-in function max>): {SIZE}"),
        (Batcher, {"batch_bytes": 0}, "batch_bytes is 0: it must be a whole number from 1 to 1,073,741,824"),
        (Batcher, {"batch_timeout": timedelta(0)}, f"batch_timeout is datetime.timedelta(0): {SPAN}"),
        (Splitter, {"step": 3}, "step is 3: it should be callable"),
        (Splitter, {"step": ...}, "step is missing: Called with a message and the accumulator."),
        (Splitter, {"acc": 0}, f"acc is 0: {NO_SUCH}; there is initial, step"),
        (Splitter, {"initial": LOCK}, f"initial is {shown(LOCK)}: {COPY} (TypeError)"),
        (Producer, {"patience": 30}, f"patience is 30: {A_SPAN}"),
        (Producer, {"patience": timedelta(0)}, f"patience is datetime.timedelta(0): {SPAN}"),
        (Retention, {"messages": timedelta(days=-1)}, f"messages is datetime.timedelta(days=-1): {SPAN}"),
        (Retention, {"failed": timedelta(10**6)}, f"failed is datetime.timedelta(days=1000000): {SPAN}"),
        (Producer, {"schedule": "hourly"}, f"schedule is 'hourly': it is no cron schedule: {WAY_OUT}"),
        (
            Producer,
            {"rate_limiting": 5},
            "rate_limiting is 5: it should be a valid dictionary or instance of RateLimiting",
        ),
        (Batcher, {"schema": {"a": 1}}, "schema is {'a': 1}: it should be a subclass of BaseModel"),
        (
            Processors,
            {"max_demand": 10, "min_demand": 10},
            (
                "min_demand is 10, not below max_demand (10): every look at the backlog would start a run. "
                "Lower it or leave it out."
            ),
        ),
        (Producer, {"max_runs": 0, "interval": 5}, f"max_runs is 0: {THOUSAND}; Producer.interval is 5: {A_SPAN}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else getattr(value, "__name__", ""),
)
def test_an_option_that_cannot_work_is_refused_on_one_line(model, options, words):
    needed = {
        Producer: {"source": "s"},
        RateLimiting: {"allowed_messages": 1, "interval": SECOND},
        TableBatcher: {"schema": Row},
        Splitter: {"initial": 0, "step": max},
    }
    said = {**needed.get(model, {}), **options}

    with pytest.raises(PipelineError) as refused:
        model(**{name: value for name, value in said.items() if value is not ...})

    assert str(refused.value) == f"{model.__name__}.{words}"


def test_options_do_not_change_once_built():
    with pytest.raises(ValidationError, match="frozen"):
        Producer(source="s").max_runs = 3


def test_a_run_is_worth_its_cost_from_half_of_what_it_may_take_on():
    assert Processors(concurrency=2, max_demand=100).worthwhile == 100
    assert Processors(concurrency=2, max_demand=100, min_demand=90).worthwhile == 20


class Order(BaseModel):
    number: int
    status: str


class Clash(BaseModel):
    Window: str


class Twins(BaseModel):
    late: int
    Late: int


class Anything(BaseModel):
    field: object


class Empty(BaseModel):
    pass


class Endless(BaseModel):
    inner: "Endless | None" = None


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"name": "Flights"}, "name is 'Flights': lower-case letters"),
        ({"name": ...}, "name is None: lower-case letters"),
        ({"name": "../etc"}, "name is '../etc'"),
        ({"producer": "queue"}, r"producer is 'queue': it must be a Producer\(...\)"),
        ({"processors": 2}, r"processors is 2: it must be a Processors\(...\)"),
        ({"context": {"limit": 3}}, "context is .*an instance of a pydantic model"),
        ({"batchers": ["lake"]}, "batchers is .*it must be a dict"),
        ({"batchers": {"messages": TableBatcher(schema=Row)}}, "batchers is 'messages': not the name of a batcher"),
        ({"batchers": {"a/../b": TableBatcher(schema=Row)}}, "not the name of a batcher"),
        ({"batchers": {"lake": "TableBatcher"}}, r"batchers\['lake'\] is 'TableBatcher': it must be a Batcher"),
        ({"batchers": {"lake": Batcher()}}, "the class has no handle_batch; write one, or use TableBatcher"),
        ({"batchers": {"lake": TableBatcher(schema=Clash)}}, r"the platform adds columns \['window'\]: rename them"),
        ({"batchers": {"lake": TableBatcher(schema=Twins)}}, r"\['late'\] differ in nothing but case"),
        ({"batchers": {"lake": TableBatcher(schema=Anything)}}, "Anything.field is .*object.*use bool, int, float"),
        ({"batchers": {"lake": TableBatcher(schema=Empty)}}, "Empty has no fields"),
        ({"batchers": {"lake": TableBatcher(schema=Endless)}}, "Endless holds itself"),
        ({"handle_message": ...}, "handle_message is None: write either handle_message or handle_messages"),
        ({"handle_messages": lambda self, messages, context: messages}, "handle_message is 'both'"),
        (
            {
                "handle_message": ...,
                "handle_messages": lambda self, messages, context: messages,
                "batchers": {"lake": TableBatcher(schema=Order)},
            },
            r"Order.: in handle_messages the columns \['status'\] say where a row goes",
        ),
        ({"window_cron": "hourly"}, "window_cron is 'hourly': write five fields .* such as '0 . . . .' for every hour"),
        ({"window_cron": "0 24 * * *"}, "window_cron is '0 24 . . .': write five fields"),
        ({"window_cron": 3600}, "window_cron is 3600: write five fields"),
        ({"redrive": "at night"}, "redrive is 'at night': write five fields .* or leave it out"),
        ({"first_window": "yesterday"}, "first_window is 'yesterday': it must be a time with its zone: datetime"),
        ({"first_window": datetime(2026, 1, 1)}, r"first_window is datetime.*0\): it must be a time with its zone"),
        ({"owners": ("me",)}, "owners is 'me': an owner is an e-mail address or 'team:<name>'"),
        ({"owners": "team:data"}, r"owners is 'team:data': it must be a tuple of owners, \('team:data',\)"),
        ({"owners": 1}, "owners is 1: it must be a tuple of owners"),
        ({"fail_run_on": "always"}, "fail_run_on is 'always': it is 'never', 'any', or a share"),
        ({"fail_run_on": 2.0}, "fail_run_on is 2.0"),
        ({"fail_run_on": True}, "fail_run_on is True"),
    ],
)
def test_a_pipeline_that_cannot_work_is_refused_when_its_class_is_built(attributes, words):
    with pytest.raises(PipelineError, match=words) as refused:
        build(**attributes)

    assert str(refused.value).startswith("Flights."), "it says which class"


@pytest.mark.parametrize("share", ["never", "any", 0, 0.5, 1])
def test_a_run_ends_red_never_or_from_any_share_of_failures(share):
    assert build(fail_run_on=share).fail_run_on == share


CRONS = [
    *("0 * * * *", "*/5 * * * *", "30 2 * * mon-fri", "0 0,12 1-15/2 JAN,jul 7", "@daily", "5-55/10 9-17 * * 1,3"),
    *("hourly", "", "* * * *", "0 0 * * * *", "60 * * * *", "0 24 * * *", "0 0 0 * *", "0 0 * 13 *", "0 0 * * 8"),
    *("*/0 * * * *", "a * * * *", "1-x * * * *", "0 0 * * monday", "@often", "1,, * * * *", "-1 * * * *"),
]


@pytest.mark.parametrize("schedule", CRONS)
def test_what_is_a_cron_schedule_is_one_to_dagster_too(schedule):
    from dagster._utils.schedules import is_valid_cron_schedule

    assert is_cron(schedule) == is_valid_cron_schedule(schedule)


def test_what_pipelines_share_may_lie_in_a_base_that_is_none_itself():
    class Shared(Pipeline, abstract=True):
        producer = Producer(source="s")

        def handle_message(self, message, context):
            return message

    class One(Shared):
        name = "one"

    assert One.producer.source == "s"
    with pytest.raises(PipelineError, match="name is None: lower-case letters"):
        type("Nameless", (Shared,), {})


def test_a_pipeline_without_batchers_will_do():
    assert build().batchers == {}


class Settings(BaseModel):
    limit: int = 3


def test_a_run_overrides_fields_of_the_context():
    assert build(context=Settings()).context_of({"limit": 5}) == Settings(limit=5)
    assert build(context=Settings()).context_of({}) == Settings()


@pytest.mark.parametrize(
    ("context", "overrides", "words"),
    [
        (None, {"limit": 5}, r"the run sets context \['limit'\], but the pipeline has no context"),
        (Settings(), {"limmit": 5}, r"context has no field \['limmit'\]; it has \['limit'\]"),
        (Settings(), {"limit": "many"}, "does not fit"),
    ],
)
def test_a_context_that_does_not_fit_is_refused(context, overrides, words):
    with pytest.raises(PipelineError, match=words):
        build(context=context).context_of(overrides)


def test_a_pipeline_is_described_by_its_docstring():
    assert Keeping.description() == "Keeps the text of every message; one that says `fail` fails."
