"""What docs/sources/kafka.md shows is run, on a real topic."""

import json
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.patience import patiently
from pipeline_platform.tasks.handle import Handler
from resources.kafka import KafkaSource

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "sources" / "kafka.md").read_text()
PIPELINE, TOPIC = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)


def test_the_pipeline_handles_what_its_topic_gives(
    kafka_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": kafka_server})
    admin.create_topics([NewTopic("clicks", 2)])["clicks"].result(30)
    monkeypatch.setenv("CLICKS_KAFKA", kafka_server)
    shown: dict[str, Any] = {"__name__": "clicks"}
    exec(compile(PIPELINE, "kafka.md", "exec"), shown)  # our own text
    before, named, after = (ROOT / "definitions.py").read_text().partition("\ndefs = ")
    names: dict[str, Any] = {"__name__": "definitions_of_the_document"}
    exec(compile(before + "\n" + TOPIC + named + after, "definitions.py", "exec"), names)
    dg.Definitions.validate_loadable(names["defs"])
    clicks: type[Pipeline] = shown["Clicks"]

    with dg.build_resources({"clicks_topic": names["defs"].resources["clicks_topic"]}) as resources:
        topic: KafkaSource = resources.clicks_topic
        topic.open(ControlStore(f"sqlite:///{tmp_path}/control.sqlite"))
        topic.send([json.dumps({"user": "Zoë", "page": str(n)}).encode() for n in range(3)] + [b"no click"])
        patiently(topic.check_ready)  # a broker that has just started loads its groups first
        shares = topic.plan(10, 2, "r1")
        messages = [
            message
            for share in shares
            for batch in topic.read(share, "r1")
            for message in Handler(clicks(), None, topic.settling).handle(batch)
        ]
        topic.finish("r1")
        assert topic.backlog().messages == 0
        topic.close()

    assert clicks.producer.source == topic.name
    assert sorted(message.data.page for message in messages if message.status == "ok") == ["0", "1", "2"]
    (failed,) = [message for message in messages if message.failure]
    assert failed.data == b"no click"


def test_every_option_of_the_source_is_told() -> None:
    ours = set(KafkaSource.model_fields) - {"name"}

    assert {name for name in ours if f"`{name}`" not in DOCUMENT} == set()
