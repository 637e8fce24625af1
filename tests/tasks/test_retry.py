"""What is recorded of a failure: when it is due, or that it is dead."""

from datetime import timedelta

import pytest

from pipeline_platform import Processors, Retry
from tests.fixtures.obedient import Obedient
from tests.fixtures.small_lake import Memory, handled, numbered, rows_of

HOUR = timedelta(hours=1)


class Retried(Obedient):
    """Fails as its messages say, three times at the most."""

    name = "retried"
    processors = Processors(max_message_bytes=20)
    retry = Retry(max_attempts=3, backoff=HOUR)

    def handle_message(self, message, context):
        if message.data == b"never":
            return message.failed("will never do", retry=False)
        if message.data == b"judged":
            raise LookupError("as told")
        return message.failed("not now")

    def handle_failed(self, messages, context):
        return [
            message.failed("no such order", retry=False) if message.failure.kind == "LookupError" else message
            for message in messages
        ]


class Unretried(Retried):
    """The same, and nobody said what to do with failures."""

    retry = None


class Redelivered(Memory):
    """A source that counts deliveries."""

    attempt: int = 1

    def deliveries(self, **columns):
        return super().deliveries(**columns, attempt=[self.attempt] * len(columns["message_id"]))


def failed(lake, pipeline, *payloads, attempt=1):
    source = Redelivered(deliveries_=numbered(*payloads), attempt=attempt)
    return handled(lake, pipeline, source=source)


def recorded(lake, pipeline, *payloads, attempt=1):
    manifest = failed(lake, pipeline, *payloads, attempt=attempt)
    return rows_of(lake, pipeline.name, manifest, "failed")


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_failure_is_due_after_its_pause(lake, attempt):
    (row,) = recorded(lake, Retried, b"later", attempt=attempt)
    assert row["state"] == "open"
    assert HOUR <= row["due_at"] - row["at"] <= 1.25 * HOUR


@pytest.mark.parametrize("attempt", [3, 4])
def test_a_failure_of_the_last_attempt_is_dead_and_keeps_its_payload(lake, attempt):
    (row,) = recorded(lake, Retried, b"later", attempt=attempt)
    assert (row["state"], row["due_at"], row["data"]) == ("dead", None, b"later")


@pytest.mark.parametrize("pipeline", [Retried, Unretried])
@pytest.mark.parametrize(
    ("payload", "reason"),
    [(b"never", "will never do"), (b"judged", "no such order"), (b"x" * 21, "its payload has 21 bytes")],
)
def test_what_can_never_pass_is_dead_at_once(lake, pipeline, payload, reason):
    (row,) = recorded(lake, pipeline, payload)
    assert (row["state"], row["due_at"]) == ("dead", None)
    assert row["reason"].startswith(reason)


def test_without_the_option_a_failure_waits_for_people(lake):
    (row,) = recorded(lake, Unretried, b"later", attempt=7)
    assert (row["state"], row["due_at"]) == ("open", None)


def test_dead_messages_are_counted_apart(lake):
    manifest = failed(lake, Retried, b"later", b"never", b"later")
    assert (manifest.total("failed"), manifest.total("dead")) == (3, 1)
