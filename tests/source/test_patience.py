"""Retries while a source is unavailable."""

import pytest

from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.source.patience import patiently
from pipeline_platform.source.pauses import Patience, pause_s


def test_an_unavailable_source_is_retried_until_it_answers(caplog):
    answers = iter([SourceAwayError("restarting"), SourceAwayError("restarting"), "here"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(ask) == "here"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert all("restarting" in text for text in caplog.messages)


def test_the_last_error_of_an_unavailable_source_is_raised():
    with pytest.raises(SourceAwayError, match="gone for good"):
        patiently(_away, Patience(within_s=0.0))


@pytest.mark.parametrize(
    ("error", "patience"),
    [(SourceError("no such queue"), Patience()), (SourceAwayError("gone"), Patience("stop"))],
    ids=["a refusal", "asked to stop"],
)
def test_a_permanent_error_is_not_retried(error, patience):
    tries = []

    def ask() -> None:
        tries.append(1)
        raise error

    with pytest.raises(SourceError) as told:
        patiently(ask, patience)
    assert (told.value, tries) == (error, [1])


def _away() -> None:
    raise SourceAwayError("gone for good")


def waited(patience: Patience, tries: int) -> list[float]:
    """Return pauses after a number of failed attempts."""
    return [pause_s(patience, number + 1) for number in range(1, tries + 1)]


def test_exponential_pauses_double_from_the_shortest_to_the_longest():
    assert waited(Patience("exp", 1.0, 10.0), 6) == [1, 2, 4, 8, 10, 10]


def test_random_pauses_vary_within_their_bounds():
    said = waited(Patience("rand", 2.0, 5.0), 200)
    assert all(2 <= pause <= 5 for pause in said)
    assert len(set(said)) > 100


def test_random_exponential_pauses_vary_below_a_bound_that_doubles():
    for number in range(1, 8):
        said = [waited(Patience("rand_exp", 1.0, 10.0), number)[-1] for _ in range(100)]
        assert all(1 <= pause <= min(2 ** (number - 1), 10) for pause in said)
        assert (max(said) > 5) == (number >= 4), "the bound of the fourth pause is 8"


@pytest.mark.parametrize("backoff", ["exp", "rand_exp"])
def test_each_wait_starts_with_the_shortest_pause(backoff):
    patience = Patience(backoff, 0.01, 10.0)
    for _ in range(2):
        answers = iter([SourceAwayError("restarting")] * 3)
        slept: list[float] = []

        def ask(answers=answers) -> str:  # type: ignore[no-untyped-def]
            for error in answers:
                raise error
            return "here"

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("tenacity.nap.time.sleep", slept.append)
            assert patiently(ask, patience) == "here"
        assert slept[0] == 0.01
        assert all(pause <= longest for pause, longest in zip(slept, [0.01, 0.02, 0.04], strict=True))
