"""Retries: time of the next attempt, and the last attempt."""

from datetime import UTC, datetime, timedelta

import pytest
from pydantic import BaseModel, ValidationError

from pipeline_platform import Failure, PayloadError, Pipeline, Producer
from pipeline_platform.model.retry import Backoff, Retry
from pipeline_platform.model.strict_options import PipelineError

FAILED_AT = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
DOUBLING = Backoff(first=10 * SECOND, factor=2.0, most=60 * SECOND)


def pauses(retry: Retry, *attempts: int, message_id: str = "m") -> list[float]:
    return [(retry.due_at("q", message_id, attempt, FAILED_AT) - FAILED_AT).total_seconds() for attempt in attempts]


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        (7 * SECOND, [7, 7, 7, 7, 7]),
        (DOUBLING, [10, 20, 40, 60, 60]),
        (Backoff(first=SECOND, factor=1, most=SECOND), [1, 1, 1, 1, 1]),
        (Backoff(first=SECOND, factor=100.0, most=timedelta(days=36_500)), [1, 100, 10_000, 10**6, 10**8]),
    ],
)
def test_a_pause_grows_up_to_the_longest_and_at_most_a_quarter_is_added(backoff, expected):
    for pause, least in zip(pauses(Retry(max_attempts=9, backoff=backoff), 1, 2, 3, 4, 5), expected, strict=True):
        assert least - 0.001 <= pause <= least * 1.25


def test_a_pause_of_any_attempt_is_within_bounds():
    (pause,) = pauses(Retry(max_attempts=1_000, backoff=DOUBLING), 2**31 - 1)
    assert 60 <= pause <= 75


def test_the_random_part_is_constant_for_a_message_and_differs_between_messages():
    retry = Retry(max_attempts=3, backoff=DOUBLING)
    assert pauses(retry, 1) == pauses(retry, 1)
    assert len({pauses(retry, 1, message_id=str(number))[0] for number in range(100)}) == 100


@pytest.mark.parametrize(("attempt", "last"), [(1, False), (2, False), (3, True), (4, True)])
def test_an_attempt_from_max_attempts_on_is_the_last(attempt, last):
    assert Retry(max_attempts=3).is_last(attempt) == last


def test_a_pause_without_jitter_is_exact_and_jitter_may_shorten_it():
    assert [DOUBLING.before(attempt) / SECOND for attempt in (2, 3, 4, 5, 2**31)] == [10, 20, 40, 60, 60]
    assert DOUBLING.before(3, -0.5, 1.0) == 10 * SECOND
    assert all(10 * SECOND <= DOUBLING.before(3, -0.5) <= 20 * SECOND for _ in range(100))


def failure_of(error: BaseException) -> Failure:
    return Failure.of(error, "handle_message")


class StatusError(Exception):
    """A refusal with a status."""

    def __init__(self, code):
        self.code = code


def is_busy(error):
    return error.code == 503


@pytest.mark.parametrize(
    ("rules", "retried", "dead"),
    [
        ({}, [LookupError(), Failure("timeout", "")], [PayloadError(), Failure("ValidationError", "")]),
        ({"never": ()}, [PayloadError(), LookupError()], []),
        ({"never": (LookupError, "timeout")}, [PayloadError()], [KeyError(), Failure("timeout", "")]),
        ({"on": (ConnectionError,)}, [ConnectionResetError()], [LookupError(), Failure("failed", "")]),
        ({"on": ("timeout", PayloadError)}, [Failure("timeout", ""), PayloadError()], [ConnectionError()]),
        ({"on": (OSError,), "never": (FileNotFoundError,)}, [TimeoutError()], [FileNotFoundError()]),
        ({"on": ("OSError",)}, [OSError()], [ConnectionError()]),
        (
            {"on": (is_busy, "timeout")},
            [StatusError(503), Failure("timeout", "")],
            [StatusError(404), Failure("StatusError", "")],
        ),
        ({"never": (is_busy,)}, [StatusError(404), Failure("timeout", "")], [StatusError(503)]),
    ],
)
def test_a_failure_is_retried_by_its_class_kind_or_a_function_of_its_exception(rules, retried, dead):
    retry = Retry(max_attempts=3, **rules)
    failures = [each if isinstance(each, Failure) else failure_of(each) for each in [*retried, *dead]]

    assert [retry.judged(failure).retry for failure in failures] == [True] * len(retried) + [False] * len(dead)


def test_a_payload_that_does_not_fit_a_model_is_not_retried_by_default():
    class Order(BaseModel):
        number: int

    with pytest.raises(ValidationError) as refused:
        Order(number="many")

    assert not Retry(max_attempts=3).judged(failure_of(refused.value)).retry


def test_a_class_that_a_later_step_no_longer_knows_counts_by_its_name():
    assert Retry(max_attempts=3, on=(ConnectionError,)).judged(Failure("ConnectionError", "")).retry


@pytest.mark.parametrize("rules", [{"on": (is_busy,)}, {"never": (is_busy,)}])
def test_a_function_that_raises_is_named_in_the_reason_once_and_the_failure_may_be_retried(rules):
    retry = Retry(max_attempts=3, **rules)
    failure = retry.judged(retry.judged(failure_of(KeyError("bank"))))

    assert failure.retry
    assert failure.reason.count("A function of Retry raised AttributeError") == 1


async def is_busy_later(error):
    return True


@pytest.mark.parametrize("function", [is_busy_later, lambda: True])
def test_a_function_that_cannot_judge_an_exception_is_refused(function):
    with pytest.raises(PipelineError, match=r"retry: must (return its result directly|be callable with \(error\))"):

        class Judging(Pipeline):
            name = "judging"
            producer = Producer(source="queue")
            retry = Retry(max_attempts=3, never=(function,))

            def handle_message(self, message, context):
                return message


def test_a_failure_keeps_no_frames_of_its_exception_and_its_causes():
    try:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise LookupError("effect") from cause
    except LookupError as effect:
        error = Failure.of(effect, "handle_message").error

    assert (error.__traceback__, error.__cause__.__traceback__) == (None, None)
