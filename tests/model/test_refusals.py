"""What an author gets wrong is refused on one line, which says class, option, value and what is allowed."""

import re

import pytest

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import Options
from tests.fixtures.refusals import refusals, said_of

SAID = [refusal.said for refusal in refusals()]


@pytest.mark.parametrize("refusal", refusals(), ids=lambda refusal: refusal.code)
def test_it_is_refused_by_the_words_of_the_file(refusal):
    assert said_of(refusal.code) == refusal.said, "if it is better now: python -m tests.fixtures.refusals"


@pytest.mark.parametrize("model", Options.__subclasses__(), ids=lambda model: model.__name__)
def test_each_option_has_a_wrong_value_in_the_file(model):
    names = [field.alias or name for name, field in model.model_fields.items()]
    assert [name for name in names if not any(said.startswith(f"{model.__name__}.{name} is ") for said in SAID)] == []


@pytest.mark.parametrize("option", Pipeline.__annotations__)
def test_each_option_of_the_class_has_a_wrong_value_in_the_file(option):
    assert any(re.match(rf"Flights\.{option}\b.* is ", said) for said in SAID)
