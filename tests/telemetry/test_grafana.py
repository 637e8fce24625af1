"""`deploy/grafana`: the dashboard and the alert rules use only metrics and labels that runs and sensors export."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import promql_parser
import pytest
import yaml
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pipeline_platform import telemetry
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.retry import Retry
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.reports.run_checks import count_failures
from pipeline_platform.telemetry import configuration
from pipeline_platform.telemetry.exporter import Exporter
from tests.fixtures.flow import run
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.sensor import Place

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
BOARD = json.loads((FOLDER / "dashboard.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
UNITS = {"short", "s", "msg/s", "percentunit", "rpm", "cpm"}
EXPRESSIONS = [
    *((panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]),
    *((rule["alert"], rule["expr"]) for rule in RULES),
]


class Skipping(Obedient):
    """Skips a message on request."""

    name = "skipping"

    def handle_message(self, message, context):
        return message.skip("asked to") if message.data == b"skip" else super().handle_message(message, context)


class Retried(Told):
    """A pipeline whose failures are retried."""

    name = "retried"
    retry = Retry(max_attempts=3)


def retry_tick(place: Place) -> None:
    """Evaluate the sensor of retries of a pipeline without failures."""
    lake = Lake(root=str(place.folder / "lake"))
    definitions = platform_definitions([Retried], resources_at(str(place.folder), "nowhere"))
    resources = {"queue": place.queue, "lake": lake, "control": place.control}
    context = dg.build_sensor_context(instance=place.instance, resources=resources, definitions=definitions)
    definitions.resolve_sensor_def("retried_retry").evaluate_tick(context)


def prometheus_names(name: str, unit: str, kind: str) -> Iterator[str]:
    """Yield the names of a metric's series, by the rules of OpenTelemetry for Prometheus."""
    seconds = "_seconds" if unit == "s" else ""
    name = name.replace(".", "_") + seconds
    yield from [f"{name}_{part}" for part in ("bucket", "sum", "count")] if kind == "Histogram" else [name]
    if kind == "Sum":
        yield f"{name}_total"


@pytest.fixture
def exported(here, place) -> dict[str, dict[str, set[str]]]:
    """Return the values of each label of each series that a run, ticks of sensors and a report export."""
    reader = InMemoryMetricReader()
    telemetry.attach(configuration.NAME, configuration.EXPORTED, Exporter(meters=MeterProvider([reader])))
    try:
        flow = here(Skipping, [b"one", b"two", b"raise", b"skip", b"batch a", b"batch few"])
        run(flow)
        count_failures(Skipping, flow.lake)
        place.enqueue(7)
        place.tick()
        retry_tick(place)
    finally:
        telemetry.detach(configuration.NAME)
    series: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    (resource,) = reader.get_metrics_data().resource_metrics
    for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
        for name in prometheus_names(metric.name, metric.unit, type(metric.data).__name__):
            for point in metric.data.data_points:
                for label, value in {**point.attributes, **({"le": ""} if name.endswith("_bucket") else {})}.items():
                    series[name][label].add(value)
    return series


def used(expression: str) -> tuple[list[Any], set[str]]:
    """Return the selectors of an expression, and the labels that it groups by; fail if it is not valid."""
    text = expression.replace("$__rate_interval", "5m").replace("$pipeline", ".*")
    selectors, labels = [], set[str]()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            selectors.append(node)
        if isinstance(node, promql_parser.MatrixSelector):
            selectors.append(node.vector_selector)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            labels.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(text), visit)
    return selectors, labels


def test_every_expression_is_valid_and_selects_what_is_exported(exported):
    metrics = {name for _, expression in EXPRESSIONS for name in re.findall(r"pipeline_platform_\w+", expression)}
    assert metrics <= exported.keys()
    for title, expression in EXPRESSIONS:
        selectors, labels = used(expression)
        assert selectors, title
        for selector in selectors:
            known = exported[selector.name]
            # The attribute `producer` exists only in a pipeline with several producers.
            assert labels - {"producer"} <= known.keys(), (title, selector.name)
            for matcher in selector.matchers.matchers:
                assert matcher.name in known, (title, matcher.name)
                if str(matcher.op) == "MatchOp.Equal":
                    assert matcher.value in known[matcher.name], (title, matcher.value)


def test_every_panel_has_a_title_a_description_and_a_unit():
    for panel in BOARD["panels"]:
        assert panel["title"], panel
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert {variable["name"] for variable in BOARD["templating"]["list"]} == {"datasource", "pipeline"}


def test_panels_do_not_overlap():
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_each_rule_has_a_severity_and_texts_with_labels_of_its_expression():
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        _, labels = used(rule["expr"])
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels, rule["alert"]
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
