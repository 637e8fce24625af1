"""What `handle_batch` may change of a message, and what fails it."""

from collections.abc import Callable

import pytest

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.message import Message
from tests.fixtures.small_lake import outcomes, rows_of
from tests.tasks.test_batch import Obedient, batched, staged


@pytest.fixture
def lake(tmp_path):
    return Lake(root=str(tmp_path))


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[Message], Message]) -> None:
    """Have `handle_batch` change the first message of each batch."""

    def handle_batch(self, batcher, messages, batch_info, context):
        return [change(messages[0]), *messages[1:]]

    monkeypatch.setattr(Obedient, "handle_batch", handle_batch)


def test_handle_batch_may_change_data_and_how_a_message_is_settled(lake, monkeypatch):
    changing(monkeypatch, lambda message: message.put_data({"new": 1}).configure_ack(on_success="noop"))

    manifest = batched(lake, staged("1", "2"))

    assert [row["data"] for row in rows_of(lake, "obedient", manifest, "plain")] == ['{"new":1}', '"2"']
    assert [row["action"] for row in rows_of(lake, "obedient", manifest, "outcomes")] == ["noop", "ack"]


def test_handle_batch_may_say_how_a_failed_message_is_settled(lake, monkeypatch):
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
