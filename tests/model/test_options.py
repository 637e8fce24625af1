"""Options are checked when they and the class are built."""

import pytest
from pydantic import BaseModel, ValidationError

from pipeline_platform.model.options import Processors, Producer
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.model.windows import is_cron, most_a_day
from tests.fixtures.built import build
from tests.fixtures.small_lake import Keeping


def test_options_do_not_change_once_built():
    with pytest.raises(ValidationError, match="frozen"):
        Producer(source="s").max_runs = 3


def test_a_run_starts_from_half_of_max_demand_by_default():
    assert Processors(concurrency=2, max_demand=100).worthwhile == 100
    assert Processors(concurrency=2, max_demand=100, min_demand=90).worthwhile == 20


@pytest.mark.parametrize("share", [None, 0, 0.5, 1])
def test_a_run_fails_never_or_above_a_share_of_failures(share):
    assert build(max_failed_share=share).max_failed_share == share


CRONS = [
    *("0 * * * *", "*/5 * * * *", "30 2 * * mon-fri", "0 0,12 1-15/2 JAN,jul 7", "@daily", "5-55/10 9-17 * * 1,3"),
    *("hourly", "", "* * * *", "0 0 * * * *", "60 * * * *", "0 24 * * *", "0 0 0 * *", "0 0 * 13 *", "0 0 * * 8"),
    *("*/0 * * * *", "a * * * *", "1-x * * * *", "0 0 * * monday", "@often", "1,, * * * *", "-1 * * * *"),
    *("0 22-2 * * *", "0 0 * * fri-sun", "0 0 * nov-feb *", "50-10/5 * * * *", "0 25-2 * * *", "0 0 9-32 * *"),
    *("0 0 30 2 *", "0 0 31 FEB *", "0 0 29 2 *", "0 0 31 4 *", "@Hourly"),
]


def test_cron_schedules_are_validated_like_in_dagster():
    from dagster._utils.schedules import is_valid_cron_schedule

    assert [cron for cron in CRONS if is_cron(cron) != is_valid_cron_schedule(cron)] == []


@pytest.mark.parametrize(
    ("schedule", "times"), [("@hourly", 24), ("0 22-2 * * *", 5), ("50-10/5 8,9 * * *", 10), ("*/15 9-17/4 * * *", 12)]
)
def test_the_times_of_a_day_are_counted(schedule, times):
    assert most_a_day(schedule) == times


def test_pipelines_may_share_options_in_an_abstract_base():
    class Shared(Pipeline, abstract=True):
        producer = Producer(source="s")

        def handle_message(self, message, context):
            return message

    class One(Shared):
        name = "one"

    assert One.producer.source == "s"
    with pytest.raises(PipelineError, match=r"Nameless\.name: .*, got None"):
        type("Nameless", (Shared,), {})


def test_a_pipeline_needs_no_batchers():
    assert build().batchers == {}


class Settings(BaseModel):
    limit: int = 3


def test_a_run_overrides_fields_of_the_context():
    assert build(context=Settings()).context_of({"limit": 5}) == Settings(limit=5)
    assert build(context=Settings()).context_of({}) == Settings()


def test_a_pipeline_is_described_by_its_docstring():
    assert Keeping.description() == "Stores the text of every message; `fail` fails."
