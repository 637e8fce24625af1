"""An author's mistake is refused with one line: class, option, value and fix."""

import re

import pytest

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import Options
from tests.fixtures.refusals import refusals, said_of

ERRORS, OPTIONS = [refusal.said for refusal in refusals()], Options.__subclasses__()


@pytest.mark.parametrize("refusal", refusals(), ids=lambda refusal: refusal.code)
def test_a_mistake_is_refused_with_the_error_of_the_file(refusal):
    assert said_of(refusal.code) == refusal.said, "if it is better now: python -m tests.fixtures.refusals"


def test_an_error_starts_with_the_option_and_ends_with_a_full_stop():
    assert [error for error in ERRORS if not re.match(r"[\w.'\[\]]+: .*[.?]$", error)] == []


def test_each_option_has_a_wrong_value_in_the_file():
    fields = [(model, field.alias or name) for model in OPTIONS for name, field in model.model_fields.items()]
    options = [f"{model.__name__}.{name}" for model, name in fields]
    assert len(OPTIONS) > 5
    assert [option for option in options if not any(error.startswith(f"{option}: ") for error in ERRORS)] == []
    options = [rf"Flights\.{option}\b.*: " for option in Pipeline.__annotations__]
    assert [option for option in options if not any(re.match(option, error) for error in ERRORS)] == []
