"""Where to look once a demo is over."""

from __future__ import annotations

import shlex

from pipelines.demo.place import Place, Progress
from pipelines.local_servers import sqs


def where_next(place: Place, progress: Progress) -> list[tuple[str, str]]:
    """What there is to look at after a demo, and what it is."""
    in_the_ui = "the Dagster UI with these runs, assets, failures and backfill"
    places = [
        ("make dev", in_the_ui),
        ("pipelines/flights.py", "the pipeline, in a page"),
        (str(place.chart), "the chart"),
        (str(place.lake), "the tables, for Polars, Spark, DuckDB, Trino"),
    ]
    if progress.source == "table":
        return [*places, (status_command(place, progress), "backlog, runs, failures")]
    # The SQS server ended with the demo; `make dev` starts another, at an address that nobody knows yet.
    return [("make dev", f"{in_the_ui}; with an empty SQS queue, and how to ask for its backlog"), *places[1:]]


def status_command(place: Place, progress: Progress | None) -> str:
    """What a shell in the checkout asks for backlog, runs and failures with; over SQS while the server runs."""
    variables = {"PIPELINE_PLATFORM_HOME": str(place.home)}
    if progress and progress.queue_url and progress.server:
        variables |= {
            "FLIGHTS_SQS_URL": progress.queue_url,
            "AWS_ENDPOINT_URL": progress.server[0],
            **{name: sqs.ENVIRONMENT[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")},
        }
    told = (f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return " ".join((*told, ".venv/bin/pipeline-platform status"))
