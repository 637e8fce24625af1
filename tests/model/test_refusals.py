"""An author's mistake is refused with one line: class, option, value and fix."""

import re

import pytest

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import Options
from tests.fixtures.refusals import refusals, said_of

ERRORS = [refusal.said for refusal in refusals()]


@pytest.mark.parametrize("refusal", refusals(), ids=lambda refusal: refusal.code)
def test_a_mistake_is_refused_with_the_error_of_the_file(refusal):
    assert said_of(refusal.code) == refusal.said, "if it is better now: python -m tests.fixtures.refusals"


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_starts_with_the_option_and_ends_with_a_full_stop(error):
    assert re.match(r"[\w.'\[\]]+: .*[.?]$", error)


@pytest.mark.parametrize("model", Options.__subclasses__(), ids=lambda model: model.__name__)
def test_each_option_has_a_wrong_value_in_the_file(model):
    names = [field.alias or name for name, field in model.model_fields.items()]
    assert [name for name in names if not any(error.startswith(f"{model.__name__}.{name}: ") for error in ERRORS)] == []


@pytest.mark.parametrize("option", Pipeline.__annotations__)
def test_each_option_of_the_class_has_a_wrong_value_in_the_file(option):
    assert any(re.match(rf"Flights\.{option}\b.*: ", error) for error in ERRORS)
