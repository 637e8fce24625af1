"""`docs/run/telemetry.md` and `docs/reference/events.md` list the metrics and events of the code."""

import re
from pathlib import Path
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.telemetry import EVENTS
from pipeline_platform.telemetry.exporter import COUNTED, GAUGES, HISTOGRAMS, Exporter
from pipeline_platform.testing import test_message as try_message

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "run" / "telemetry.md").read_text()


def rows(document: str, after: str) -> list[list[str]]:
    """Return the cells of the first table after a text in a document."""
    table = document.partition(after)[2].partition("\n|-")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_events_matches_the_code():
    names = [
        (cells[0].strip("`"), *(tuple(re.findall(r"`(\w+)`", cell)) for cell in cells[2:]))
        for cells in rows((DOCS / "reference" / "events.md").read_text(), "# Events")
    ]
    assert names == [(name, fields.start, fields.stop) for name, fields in EVENTS.items()]


def test_the_table_of_metrics_matches_the_code(monkeypatch):
    made: list[str] = []
    meters = MeterProvider()
    meter = meters.get_meter("pipeline_platform")
    for kind in ("counter", "histogram", "gauge"):
        make = getattr(meter, f"create_{kind}")
        monkeypatch.setattr(
            meter,
            f"create_{kind}",
            lambda name, *args, make=make, **more: made.append(name) or make(name, *args, **more),
        )
    monkeypatch.setattr(meters, "get_meter", lambda *_, **__: meter)

    Exporter(meters=meters)

    assert [cells[0].strip("`") for cells in rows(DOCUMENT, "### Metrics")] == made
    assert len(made) == len(COUNTED) + len(HISTOGRAMS) + len(GAUGES) + 1


def test_the_pipeline_of_the_document_gets_events(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "telemetry.md", "exec"), names)  # our own text
    pipeline: type[Pipeline] = names["Alerts"]
    assert set(pipeline.telemetry) == {"batch", "handle_failed"}
    assert try_message(pipeline, b"1").successful
