"""What is tried again while a source is away, and what is not."""

import pytest

from pipeline_platform.source.contract import Patience, SourceAwayError, SourceError
from pipeline_platform.source.patience import patiently


def test_a_source_that_comes_back_is_asked_until_it_does() -> None:
    answers = iter([SourceAwayError("restarting"), SourceAwayError("restarting"), "here"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(ask) == "here"


def test_one_that_stays_away_is_the_reason() -> None:
    with pytest.raises(SourceAwayError, match="gone for good"):
        patiently(_away, Patience(within_s=0.0))


def test_a_refusal_is_not_tried_again() -> None:
    tries = []

    def ask() -> None:
        tries.append(1)
        raise SourceError("no such queue")

    with pytest.raises(SourceError, match="no such queue"):
        patiently(ask)
    assert tries == [1]


def _away() -> None:
    raise SourceAwayError("gone for good")
