"""Code, commands and names in documents, which run and exist."""

import ast
import importlib
import importlib.metadata
import inspect
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType

import dagster as dg
import polars as pl
import pytest
import typer
from typer.core import TyperGroup

import definitions
from pipeline_platform.cli.main import app
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration import LakeResource
from pipeline_platform.orchestration.resources.sink_resources import sink_keys, sink_resource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.sinks.postgres import PostgresSink
from pipeline_platform.source.contract import Source
from pipeline_platform.testing import DummySource, test_batch
from pipelines.flights import Flights
from tests.fixtures import reference
from tests.fixtures.documents import DOCS, blocks, deployed, files, imported, source_of
from tests.fixtures.installed import needed_by, plain

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
EXAMPLES = sorted(DOCS.glob("examples/*.py"))
PAGES = [page for page in DOCUMENTS if blocks(page)]
SHOWN = [*PAGES, *EXAMPLES]
TESTS = [(page, test) for page in SHOWN for test in re.findall(r"^def (test_\w+)", page.read_text(), re.M)]

WITHIN = """
from datetime import timedelta
from pipeline_platform import *
from pipelines.flights import Flight
"""
"""Names that are available to a block that shows a part of a file."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the Python of a page: the files that it shows, or all of it as one module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    departures = imported("departures", (DOCS / "examples" / "departures.py").read_text(), tmp_path)
    custom = imported("of_your_own", "\n".join(blocks(DOCS / "connect" / "your-own.md")), tmp_path)
    # Modules that the pages let the reader write.
    for module in ("pipelines.departures", "resources.counter", "resources.trackings"):
        monkeypatch.setitem(sys.modules, module, departures if "departures" in module else custom)

    def run(page: Path) -> list[ModuleType]:
        name = f"of_{page.stem.replace('-', '_')}"
        if page.suffix == ".py":
            return [imported(name, page.read_text(), tmp_path)]
        if made := files(page):
            for file, text in made.items():
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / file).write_text(text)
            return [importlib.import_module(file.removesuffix(".py").replace("/", ".")) for file in made]
        return [imported(name, "\n\n".join([WITHIN, *blocks(page)]), tmp_path)]

    yield run
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", SHOWN, ids=named)
def test_python_that_is_shown_runs_and_its_pipelines_load(page, run):
    made = [(module.__name__, kind) for module in run(page) for kind in vars(module).values() if isinstance(kind, type)]

    pipelines = [kind for name, kind in made if issubclass(kind, Pipeline) and kind.__module__ == name]
    keys = {producer.source for pipeline in pipelines for producer in BoundProducer.all_of(pipeline)}
    keys |= {pipeline.dead_letters for pipeline in pipelines if pipeline.dead_letters}
    sources = {key: source_resource(DummySource)(name=key) for key in keys}
    sinks = {
        key: sink_resource(PostgresSink)(name=key, url="") for kind in pipelines for key in sink_keys(kind).values()
    }
    defined = definitions.platform_definitions(pipelines, {**definitions.RESOURCES, **sources, **sinks})
    dg.Definitions.validate_loadable(defined)


@pytest.mark.parametrize(("page", "test"), TESTS, ids=[f"{named(page)}:{test}" for page, test in TESTS])
def test_tests_that_are_shown_pass(page, test, run, tmp_path):
    (example,) = [vars(module)[test] for module in run(page) if test in vars(module)]

    example(*[tmp_path] * len(inspect.signature(example).parameters))


def test_the_readme_shows_the_pipeline_and_the_commands_of_the_tutorial():
    tutorial, readme = DOCS / "start" / "quickstart.md", ROOT / "README.md"
    (ours,), theirs = blocks(readme), re.findall(r"```python\n# orders.py\n(.*?)```", tutorial.read_text(), re.S)[0]

    assert ast.dump(ast.parse(ours)) == ast.dump(ast.parse(theirs))
    assert len(ours.splitlines()) <= 30
    assert [line for line in commands(readme) if line not in commands(tutorial)] == []
    assert len(readme.read_bytes()) <= 7_900


def commands(page: Path) -> list[str]:
    """Return the commands that a page shows, without comments."""
    typed = re.findall(r"^\$ (.*)$", "\n".join(blocks(page, "console")).replace("\\\n", " "), re.M)
    return [re.sub(r" +# .*", "", line).strip() for line in typed]


def test_the_example_handles_flights_and_fails_the_cancelled(run, capsys):
    (module,) = run(DOCS / "examples" / "departures.py")
    payloads = [
        b'{"carrier": "UA", "flight": 1, "dep_time": 517, "dep_delay": 2}',
        b'{"carrier": "UA", "flight": 2, "dep_time": 617, "dep_delay": 181}',
        b'{"carrier": "UA", "flight": 3, "dep_time": null, "dep_delay": null}',
        b"no flight",
    ]

    done = test_batch(module.Departures, payloads)

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


def test_several_sources_have_the_sensors_and_checks_that_the_page_names(run):
    page = DOCS / "build" / "several-sources.md"
    shown, *_ = run(page)
    queues = {key: source_resource(DummySource)(name=key) for key in ("east_queue", "west_queue")}

    defined = definitions.platform_definitions([shown.Orders], {**definitions.RESOURCES, **queues})

    location = defined.get_repository_def()
    ours = {defined.name for defined in (*location.sensor_defs, *location.schedule_defs)}
    said = set(re.findall(r"`(orders_east_\w+)`", page.read_text()))
    assert len(said) == 2
    assert said <= ours
    assert "backlog_east" in {key.name for key in location.asset_graph.asset_check_keys}


def test_an_asset_downstream_is_asked_for_when_a_window_is_new_and_reads_its_day(run, tmp_path):
    (shown,) = run(DOCS / "build" / "downstream.md")
    resources = {**definitions.RESOURCES, "lake": LakeResource(root=str(tmp_path))}
    defined = definitions.platform_definitions([Flights], resources, assets=[shown.flights_of_a_day])
    instance, now, asked = dg.DagsterInstance.ephemeral(), datetime.now(UTC), []
    windows = [f"{now - timedelta(days=days):%Y-%m-%dT%H00}" for days in (0, 0, 1)]
    rows = pl.DataFrame({"carrier": ["AA", "UA", "DL"], "window": windows})
    rows.write_delta(tmp_path / "flights" / "lake", delta_write_options={"partition_by": ["window"]})
    looked = dg.evaluate_automation_conditions(defined, instance)

    for receive_id in ("r1", "r2"):
        instance.report_runless_asset_event(
            dg.AssetMaterialization(
                ["flights", "lake"], partition=windows[0], tags={"dagster/data_version": receive_id}
            )
        )
        for _ in range(2):
            looked = dg.evaluate_automation_conditions(defined, instance, cursor=looked.cursor)
            asked.append(looked.total_requested)
    done = defined.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance, asset_selection=[dg.AssetKey("flights_of_a_day")], partition_key=f"{now:%Y-%m-%d}"
    )

    assert asked == [1, 0, 1, 0], "other windows have no data, and never will"
    assert done.output_for_node("flights_of_a_day") == 2


@pytest.mark.parametrize(("key", "kind", "lease_s"), [("orders_queue", "SqsSource", 900), ("outbox", "TableQueue", 60)])
def test_the_queues_that_are_shown_go_into_the_definitions_where_it_says(monkeypatch, key, kind, lease_s):
    monkeypatch.setenv("ORDERS_QUEUE_URL", "http://127.0.0.1:9/000000000000/orders")
    monkeypatch.setenv("OUTBOX_URL", "postgresql://127.0.0.1:9/sales")
    (block,) = [text for text in blocks(DOCS / "start" / "your-queue.md") if f"source_resource({kind})" in text]

    queue: Source = source_of(deployed([block]), key)

    assert (type(queue).__name__, queue.name, queue.lease_s) == (kind, key, lease_s)


@pytest.mark.parametrize(("file", "text"), reference.texts().items())
def test_the_reference_agrees_with_the_code(file, text):
    assert (DOCS / "reference" / file).read_text() == text, "write it again: python -m tests.fixtures.reference"


WORKER = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # importing these is an error from now on
import pipeline_platform.tasks
for module in pkgutil.walk_packages(pipeline_platform.tasks.__path__, "pipeline_platform.tasks."):
    importlib.import_module(module.name)
import pipelines.flights, pipeline_platform.connectors.sqs, pipeline_platform.connectors.table_queue
"""


def test_workers_need_no_more_installed_than_is_said():
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


def test_files_with_dagster_s_decorators_leave_types_for_dagster_to_read():
    folders = [ROOT / "assets", ROOT / "sensors", ROOT / "pipeline_platform" / "orchestration"]
    decorated = [file for folder in folders for file in folder.rglob("*.py") if DECORATED.search(file.read_text())]

    assert len(decorated) >= 5
    postponed = [file.name for file in decorated if "from __future__ import annotations" in file.read_text()]
    assert postponed == [], "CONTRIBUTING.md says why"


def headings(document: Path) -> set[str]:
    """Return the headings of a document in the form of links."""
    prose = re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in re.findall(r"^#+ (.+)$", prose, re.M)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", document.read_text())

    assert [link for link, _ in links if not (document.parent / link).exists()] == []
    places = [(document.parent / link if link else document, heading) for link, heading in links if heading]
    assert [f"{place}#{heading}" for place, heading in places if heading not in headings(place)] == []


def test_each_page_and_example_is_in_the_index():
    index = set(re.findall(r"\]\(([^)]+)\)", (DOCS / "README.md").read_text()))

    assert {str(page.relative_to(DOCS)) for page in [*DOCS.glob("*/**/*.md"), *EXAMPLES]} - index == set()


def takes(line: str) -> bool:
    """Return whether the command line accepts a command with its arguments and options; other tools are not checked."""
    typed = re.sub(r" -m \S+", "", line.rpartition("| ")[2]).replace("rows.ndjson", "-")
    if typed.startswith("pipeline-platform "):
        command, (name, *words) = typer.main.get_command(app), shlex.split(typed)
        while isinstance(command, TyperGroup):
            name, *words = words
            command = command.commands[name]
        command.make_context(name, words)
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_commands_and_tests_that_are_named_exist(document):
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    # Only of commands, because prose also contains "make" and the name of the tool.
    marked = re.findall(r"`([^`\n]+)`|^\$ (.+)$", text, re.M)
    said = [re.sub(r" -m \S+", "", quoted or typed).split() for quoted, typed in marked if (quoted or typed).strip()]
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {str(group.name) for group in app.registered_groups}

    assert {words[1] for words in said if words[0] == "make" and len(words) > 1} <= targets
    assert {words[1] for words in said if words[0] == "pipeline-platform" and len(words) > 1} <= known
    assert [line for line in commands(document) if not takes(line)] == []
    tests = {f"tests/{name}" for name in re.findall(r"\b(?!pipelines)[a-z]+/test_\w+\.py", text)} | set(
        re.findall(r"tests/[\w/]+\.py", text)
    )
    assert [name for name in tests if not (ROOT / name).exists()] == []
