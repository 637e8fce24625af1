"""What `handle_batch` may change of a message, what fails it, and what `handle_failed` is shown of that."""

from collections import Counter
from collections.abc import Callable

import pytest

from pipeline_platform.model.message import Message
from tests.fixtures.small_lake import outcomes, rows_of
from tests.tasks.test_batch import Obedient, batched, staged


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[Message], Message]) -> None:
    """Have `handle_batch` change the first message of each batch."""

    def handle_batch(self, batcher, messages, batch_info, context):
        return [change(messages[0]), *messages[1:]]

    monkeypatch.setattr(Obedient, "handle_batch", handle_batch)


def test_handle_batch_may_change_data_and_how_a_message_is_acknowledged(lake, monkeypatch):
    changing(monkeypatch, lambda message: message.put_data({"new": 1}).configure_ack(on_success="noop"))
    manifest = batched(lake, staged("1", "2"))
    assert [row["data"] for row in rows_of(lake, "obedient", manifest, "plain")] == ['{"new":1}', '"2"']
    assert [row["action"] for row in rows_of(lake, "obedient", manifest, "outcomes")] == ["noop", "ack"]


def test_handle_batch_may_say_how_a_failed_message_is_acknowledged(lake, monkeypatch):
    changing(monkeypatch, lambda message: message.failed("no").configure_ack(on_failure="nack:30"))
    manifest = batched(lake, staged("1", "2"))
    told = [(row["outcome"], row["action"]) for row in rows_of(lake, "obedient", manifest, "outcomes")]
    assert sorted(told) == [("handled", "ack"), ("returned", "nack:30")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda message: message.put_batcher("typed"), "its batcher from 'plain' to 'typed'"),
        (lambda message: message.put_batch_key("x"), "its batch_key from 'k' to 'x'"),
    ],
)
def test_a_message_that_handle_batch_sends_elsewhere_fails_alone(lake, monkeypatch, change, reason):
    changing(monkeypatch, change)
    manifest = batched(lake, staged("1", "2"))
    assert outcomes(lake, "obedient", manifest) == {"m0": "failed", "m1": "handled"}
    (failure,) = rows_of(lake, "obedient", manifest, "failed")
    assert failure["reason"] == f"handle_batch changed {reason}: handle_message says where it goes"
    assert (failure["kind"], failure["batcher"], failure["batch_key"]) == ("moved", "plain", "k")


def test_handle_failed_is_shown_what_failed_of_a_batch_and_all_of_one_that_raised(lake, monkeypatch):
    shown = []

    def handle_failed(self, messages, context):
        shown.append([message.data for message in messages])
        return messages

    monkeypatch.setattr(Obedient, "handle_failed", handle_failed)

    batched(lake, staged("fail one", "2"), staged("raise", "4", key="other"), staged("5", key="good"))

    assert shown == [["fail one"], ["raise", "4"]]


def test_a_handle_failed_that_raises_changes_nothing_of_a_batch(lake, monkeypatch):
    def handle_failed(self, messages, context):
        raise ConnectionError("nobody to tell")

    monkeypatch.setattr(Obedient, "handle_failed", handle_failed)

    manifest = batched(lake, staged("fail one", "2"), staged("3", "4", key="other"))

    ended = Counter(row["outcome"] for row in rows_of(lake, "obedient", manifest, "outcomes"))
    assert ended == {"failed": 1, "handled": 3}
    assert [row["reason"] for row in rows_of(lake, "obedient", manifest, "failed")] == ["as told"]
    assert manifest.total("handle_failed_errors") == 1
