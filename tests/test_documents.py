"""What the documents show is run, and what they name is there."""

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pipeline_platform.cli import app
from pipeline_platform.message import Message
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.source import Source
from pipeline_platform.stages.handle import Handler
from tests.small_lake import batch_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
README = (ROOT / "README.md").read_text()


def shown(containing: str) -> dict[str, Any]:
    """Run the README's Python block that holds some words; return what it defines."""
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if containing in block]
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)  # our own text
    return names


def test_the_pipeline_of_the_readme_routes_flights_and_fails_cancelled_ones() -> None:
    pipeline: type[Pipeline] = shown("class Flights(Pipeline)")["Flights"]
    payloads = [
        b'{"carrier": "UA", "flight": 1, "dep_time": 517, "dep_delay": 2}',
        b'{"carrier": "UA", "flight": 2, "dep_time": 617, "dep_delay": 181}',
        b'{"carrier": "UA", "flight": 3, "dep_time": null, "dep_delay": null}',
        b"no flight",
    ]

    handled: list[Message] = Handler(pipeline(), None).handle(batch_of(*payloads))

    assert [(message.batcher, message.batch_key) for message in handled[:2]] == [("lake", "UA"), ("alerts", "UA")]
    reasons = [message.failure.reason for message in handled[2:] if message.failure]
    assert reasons[0] == "cancelled: no departure time"
    assert "Invalid JSON" in reasons[1]


def test_the_queue_of_the_readme_is_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLIGHTS_QUEUE_URL", "http://127.0.0.1:9/000000000000/flights")

    with dg.build_resources(shown("source_resource(SqsSource)")["RESOURCES"]) as resources:
        queue: Source = resources.flights_queue

    assert (queue.name, queue.lease_s) == ("flights_queue", 900)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", document.read_text())

    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_tests_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    # Of commands only: prose also says "make" and the tool's name.
    commands = re.findall(r"`([^`\n]+)`|^\$ (.+)$", text, re.M)
    said = [(quoted or typed).split() for quoted, typed in commands if (quoted or typed).strip()]
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {str(group.name) for group in app.registered_groups}

    assert {words[1] for words in said if words[0] == "make" and len(words) > 1} <= targets
    assert {words[1] for words in said if words[0] == "pipeline-platform" and len(words) > 1} <= known
    assert [name for name in re.findall(r"tests/test_\w+\.py", text) if not (ROOT / name).exists()] == []
