"""What the README shows is run, and what the documents name is there."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import definitions
from pipeline_platform.cli.main import app
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.source_resources import source_resource
from pipeline_platform.source.contract import Source
from pipeline_platform.testing import test_batch
from tests.fixtures.documents import deployed, source_of
from tests.fixtures.installed import needed_by, plain

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
README = (ROOT / "README.md").read_text()


def block(containing: str) -> str:
    """The README's Python block that holds some words."""
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.S) if containing in text]
    return str(found)


def shown(containing: str) -> dict[str, Any]:
    """Run the README's Python block that holds some words; return what it defines."""
    names: dict[str, Any] = {}
    exec(compile(block(containing), "README.md", "exec"), names)  # our own text
    return names


def test_the_pipeline_of_the_readme_handles_flights_and_fails_the_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline: type[Pipeline] = shown("class Departures(Pipeline)")["Departures"]
    payloads = [
        b'{"carrier": "UA", "flight": 1, "dep_time": 517, "dep_delay": 2}',
        b'{"carrier": "UA", "flight": 2, "dep_time": 617, "dep_delay": 181}',
        b'{"carrier": "UA", "flight": 3, "dep_time": null, "dep_delay": null}',
        b"no flight",
    ]

    done = test_batch(pipeline, payloads)

    assert [(message.batcher, message.batch_key) for message in done.successful] == [
        ("lake", "UA"),
        ("alerts", "default"),
    ]
    assert done.actions == ["ack"] * 4
    cancelled, broken = (str(message.reason) for message in done.failed)
    assert cancelled == "cancelled: no departure time"
    assert "Invalid JSON" in broken
    (info,) = done.batches
    assert capsys.readouterr().out == f"1 late flights in batch {info.batch_id}\n"


def test_the_pipeline_of_the_readme_takes_the_place_of_the_demo_s_with_the_assets_that_it_names() -> None:
    pipeline: type[Pipeline] = shown("class Departures(Pipeline)")["Departures"]

    defined = definitions.platform_definitions([pipeline], definitions.RESOURCES)

    dg.Definitions.validate_loadable(defined)
    ours = {key.to_user_string() for key in defined.resolve_asset_graph().get_all_asset_keys()}
    named = set(re.findall(r"`(departures/\w+)`", README))
    assert len(named) == 4
    assert named <= ours
    jobs = set(re.findall(r"`(departures_\w+)`", README))
    assert len(jobs) == 3
    assert jobs <= {job.name for job in defined.resolve_all_job_defs()}


def test_the_producers_of_the_documents_have_the_sensors_schedules_and_checks_that_it_names() -> None:
    text = (ROOT / "docs" / "build" / "several-sources.md").read_text()
    (code,) = [found for found in re.findall(r"```python\n(.*?)```", text, re.S) if "producers = {" in found]
    names: dict[str, Any] = {}
    exec(compile(code, "several-sources.md", "exec"), names)  # our own text
    queues = {key: source_resource(TableQueue)(name=key, url="sqlite:///none") for key in ("east_queue", "west_queue")}

    defined = definitions.platform_definitions([names["Orders"]], {**definitions.RESOURCES, **queues})

    location = defined.get_repository_def()
    ours = {one.name for one in (*location.sensor_defs, *location.schedule_defs)}
    named = set(re.findall(r"`(orders_east_\w+)`", text))
    assert len(named) == 3
    assert named <= ours
    assert "backlog_east" in {key.name for key in location.asset_graph.asset_check_keys}


def test_the_pipeline_of_the_readme_has_some_thirty_lines() -> None:
    assert len([line for line in block("class Departures(Pipeline)").splitlines() if line.strip()]) <= 32


@pytest.mark.parametrize(("key", "kind", "lease_s"), [("orders_queue", "SqsSource", 900), ("outbox", "TableQueue", 60)])
def test_the_queues_of_the_readme_go_into_the_definitions_where_it_says(
    monkeypatch: pytest.MonkeyPatch, key: str, kind: str, lease_s: float
) -> None:
    monkeypatch.setenv("ORDERS_QUEUE_URL", "http://127.0.0.1:9/000000000000/orders")
    monkeypatch.setenv("OUTBOX_URL", "postgresql://127.0.0.1:9/sales")

    queue: Source = source_of(deployed([block(f"source_resource({kind})")]), key)

    assert (type(queue).__name__, queue.name, queue.lease_s) == (kind, key, lease_s)


WORKER = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # to import one is an error from now on
import pipeline_platform.tasks
for module in pkgutil.walk_packages(pipeline_platform.tasks.__path__, "pipeline_platform.tasks."):
    importlib.import_module(module.name)
import pipelines.flights, pipeline_platform.connectors.sqs, pipeline_platform.connectors.table_queue
"""


def test_workers_need_no_more_installed_than_is_said() -> None:
    (said,) = re.findall(r"installed on the workers(.*?);", (ROOT / "docs" / "run" / "spark.md").read_text(), re.S)
    there = {plain(found.name) for found in importlib.metadata.distributions()}
    owners = importlib.metadata.packages_distributions()
    missing = there - needed_by(re.findall(r"`([\w-]+)`", said)) - {"pipeline-platform"}
    modules = [module for module, of in owners.items() if {plain(name) for name in of} <= missing]

    assert {"dagster", "deltalake", "boto3", "polars"} <= set(modules)
    command = [sys.executable, "-c", WORKER, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]


DECORATED = re.compile(r"^\s*@dg\.(op|job|graph|asset|asset_check|sensor|schedule)\b", re.M)


def test_files_with_dagster_s_decorators_leave_types_for_dagster_to_read() -> None:
    folders = [ROOT / "assets", ROOT / "sensors", ROOT / "pipeline_platform" / "orchestration"]
    decorated = [file for folder in folders for file in folder.glob("*.py") if DECORATED.search(file.read_text())]

    assert len(decorated) >= 5
    postponed = [file.name for file in decorated if "from __future__ import annotations" in file.read_text()]
    assert postponed == [], "CONTRIBUTING.md says why"


def headings(document: Path) -> set[str]:
    """The headings of a document, as links name them."""
    prose = re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in re.findall(r"^#+ (.+)$", prose, re.M)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", document.read_text())

    assert [link for link, _ in links if not (document.parent / link).exists()] == []
    places = [(document.parent / link if link else document, heading) for link, heading in links if heading]
    assert [f"{place}#{heading}" for place, heading in places if heading not in headings(place)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_tests_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    # Of commands only: prose also says "make" and the tool's name.
    commands = re.findall(r"`([^`\n]+)`|^\$ (.+)$", text, re.M)
    said = [re.sub(r" -m \S+", "", quoted or typed).split() for quoted, typed in commands if (quoted or typed).strip()]
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {str(group.name) for group in app.registered_groups}

    assert {words[1] for words in said if words[0] == "make" and len(words) > 1} <= targets
    assert {words[1] for words in said if words[0] == "pipeline-platform" and len(words) > 1} <= known
    assert [name for name in re.findall(r"tests/[\w/]+\.py", text) if not (ROOT / name).exists()] == []
