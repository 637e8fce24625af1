"""Failures that a person closes or reopens while runs decide their messages."""

import dataclasses
from typing import Any

import pytest

from pipeline_platform.lake.failures import closing
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.message import Message
from tests.fixtures.flow import finish, handled, rows
from tests.fixtures.flow_pipelines import Obedient, Word

WRITE = closing.write_rows


class Mended(Obedient):
    """The same pipeline after an edit: all messages succeed."""

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(Word(word=message.data.decode()), batcher="words")


@pytest.mark.parametrize("is_replayed", [False, True])
def test_what_a_replay_handles_meanwhile_is_not_opened_again(filled, monkeypatch, is_replayed):
    """Its failure is closed, and a retry would write its rows a second time."""
    flow = filled(Obedient, [b"raise"])
    finish(flow, handled(flow))
    failed = FailedMessages(name="queue", lake=flow.lake, pipeline="obedient")
    assert closing.close(flow.tables, failed, "me", "known") == 1
    mended, replays = dataclasses.replace(flow, producer=BoundProducer(Mended)), [is_replayed]

    def write(*given: Any) -> Any:
        written = WRITE(*given)
        if replays and replays.pop():
            finish(mended, handled(mended, origin="messages"))
        return written

    monkeypatch.setattr(closing, "write_rows", write)
    assert closing.reopen(flow.tables, failed) == (0 if is_replayed else 1)
    assert sum(failed.chosen_by_window().values()) == (0 if is_replayed else 1)
    assert rows(flow, "words").height == is_replayed
