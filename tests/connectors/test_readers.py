"""Two deployments that use the same source: each reports the other by name while it was seen lately."""

import time

import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.source import readers
from pipeline_platform.source.readers import Reader
from tests.fixtures.kafka_source import received


@pytest.fixture
def stores(tmp_path):
    return [ControlStore(f"sqlite:///{tmp_path / name}.db") for name in ("blue", "green")]


def test_deployments_that_share_a_group_are_reported_to_each_other(kafka, kafka_topic, stores, monkeypatch):
    blue = kafka(kafka_topic())
    green = blue.model_copy()
    blue.open(stores[0])
    green.open(stores[1])
    blue.send([b"1", b"2"])

    received(blue, "a", demand=1)
    blue.finish("a")
    assert blue.backlog().others == ""
    assert "blue.db), last seen" in green.backlog().others

    received(green, "b", demand=1)
    green.finish("b")
    assert "green.db), last seen" in blue.backlog().others
    assert "blue.db), last seen" in green.backlog().others, "a commit keeps the marks of others"
    assert green.backlog().others.endswith("UTC, also reads this source")
    later = time.time() + readers.LATELY_S + 60
    monkeypatch.setattr(readers.time, "time", lambda: later)
    assert green.backlog().others == "", "one that was switched off is forgotten"


def test_a_store_keeps_its_id(stores):
    again = ControlStore(str(stores[0].url))
    assert stores[0].reader().id == again.reader().id != stores[1].reader().id


def test_invalid_marks_are_ignored():
    assert readers.of_text("set by hand") == readers.of_text("[[1]]") == []
    reader = Reader("id", "host", 5.0)
    assert readers.of_text(readers.as_text([reader])) == [reader]
