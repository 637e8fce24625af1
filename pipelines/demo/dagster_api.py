"""Dagster's own GraphQL interface, as its UI uses it: runs, backfills, materialisations."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

UNDER_WAY = ("QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING")
OVER = ("COMPLETED_SUCCESS", "COMPLETED_FAILED", "COMPLETED", "FAILED", "CANCELED")
"""Statuses of a backfill that will not change any more."""

_LOOKS = 20
_REPOSITORY = {"repositoryName": "__repository__", "repositoryLocationName": "pipeline_platform"}

_LOADED = """
query Loaded { workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError {
  __typename ... on PythonError { message } } } } } }
"""
_RUNS = """
query Runs($limit: Int!) { runsOrError(limit: $limit) { __typename ... on Runs { results {
  runId status jobName startTime endTime tags { key value } stepStats { stepKey startTime endTime status } } } } }
"""
_TICKS = """
query Ticks($sensor: SensorSelector!) { sensorOrError(sensorSelector: $sensor) { __typename ... on Sensor {
  sensorState { ticks(limit: 1) { status skipReason runIds } } } } }
"""
_LAUNCH_BACKFILL = """
mutation Launch($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }
"""
_BACKFILL = """
query Backfill($id: String!) { partitionBackfillOrError(backfillId: $id) {
  __typename ... on PartitionBackfill { status error { message } } } }
"""
_LAUNCH_RUN = """
mutation Launch($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }
"""
_TERMINATE = """
mutation Terminate($id: String!) { terminateRun(runId: $id, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) {
  __typename } }
"""


class DagsterError(Exception):
    """Dagster did not answer, or not with what was asked for."""


class Step(NamedTuple):
    """An op of a run: its name without the graph's, and when it began and ended."""

    name: str
    started: float | None
    ended: float | None


class Run(NamedTuple):
    """A run.

    Attributes:
        run_id: Its id.
        status: In Dagster's words.
        job: What ran.
        origin: Where its messages came from; None for a run of something else.
        demand: Messages that it was asked for, or took on.
        started: Seconds since the epoch.
        ended: The same.
        steps: In the order they began.
    """

    run_id: str
    status: str
    job: str
    origin: str | None
    demand: int
    started: float | None
    ended: float | None
    steps: tuple[Step, ...]

    @property
    def under_way(self) -> bool:
        """Whether it is queued or works."""
        return self.status in UNDER_WAY


class Dagster:
    """A client of one web server.

    Args:
        url: Of the web server, without a slash at its end.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def is_up(self) -> bool:
        """Whether the web server answers, and has loaded the definitions.

        Raises:
            DagsterError: They cannot be loaded.
        """
        try:
            entries = self._ask(_LOADED, {})["workspaceOrError"].get("locationEntries", [])
        except DagsterError:
            return False
        loaded = [entry["locationOrLoadError"] or {} for entry in entries]
        for each in loaded:
            if each.get("__typename") == "PythonError":
                raise DagsterError(f"Dagster cannot load the definitions: {each['message']}")
        return bool(loaded) and all(each.get("__typename") == "RepositoryLocation" for each in loaded)

    def runs(self, limit: int = 100) -> list[Run]:
        """The newest runs, newest first."""
        answer = self._look(_RUNS, {"limit": limit})["runsOrError"]
        if answer["__typename"] != "Runs":
            raise DagsterError(f"Dagster does not list its runs: {answer}")
        return [_run(told) for told in answer["results"]]

    def sensor_says(self, sensor: str) -> str:
        """What the last tick of a sensor came to."""
        answer = self._look(_TICKS, {"sensor": {**_REPOSITORY, "sensorName": sensor}})["sensorOrError"]
        ticks = (answer.get("sensorState") or {}).get("ticks") or []
        if not ticks:
            return "has not looked yet"
        tick = ticks[0]
        return str(tick["skipReason"] or (f"asked for {len(tick['runIds'])} runs" if tick["runIds"] else "looks"))

    def launch_backfill(
        self, assets: Iterable[Sequence[str]], partitions: Sequence[str], config: Mapping[str, Any], title: str
    ) -> str:
        """Launch an asset backfill, as the asset page does; return its id."""
        params = {
            "assetSelection": [{"path": list(path)} for path in assets],
            "partitionNames": list(partitions),
            "runConfigData": json.dumps(config),
            "title": title,
        }
        answer = self._ask(_LAUNCH_BACKFILL, {"params": params})["launchPartitionBackfill"]
        if "backfillId" not in answer:
            raise DagsterError(f"Dagster did not launch a backfill of {', '.join(partitions)}: {answer}")
        return str(answer["backfillId"])

    def backfill(self, backfill_id: str) -> str:
        """The status of a backfill, in Dagster's words."""
        answer = self._look(_BACKFILL, {"id": backfill_id})["partitionBackfillOrError"]
        if "status" not in answer:
            raise DagsterError(f"Dagster knows no backfill {backfill_id}: {answer}")
        return str(answer["status"])

    def materialise(self, *asset: str) -> str:
        """Launch a run that materialises one asset; return its id."""
        params = {
            "selector": {**_REPOSITORY, "pipelineName": "__ASSET_JOB", "assetSelection": [{"path": list(asset)}]},
            "mode": "default",
        }
        answer = self._ask(_LAUNCH_RUN, {"params": params})["launchRun"]
        if "run" not in answer:
            raise DagsterError(f"Dagster did not launch a run of {'/'.join(asset)}: {answer}")
        return str(answer["run"]["runId"])

    def mark_canceled(self, run_id: str) -> None:
        """Say of a run whose process is gone that it has ended."""
        self._look(_TERMINATE, {"id": run_id})

    def await_run(self, run_id: str, timeout_s: float = 120) -> Run:
        """Wait until a run is over.

        Raises:
            DagsterError: It takes longer.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for run in self.runs():
                if run.run_id == run_id and not run.under_way:
                    return run
            time.sleep(0.5)
        raise DagsterError(f"run {run_id} is not over after {timeout_s:.0f} s; see {self.url}/runs/{run_id}")

    def _look(self, query: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Ask something that may be asked again: a file that Dagster is just making is none for a moment."""
        for _ in range(_LOOKS - 1):
            try:
                return self._ask(query, variables)
            except DagsterError:
                time.sleep(0.5)
        return self._ask(query, variables)

    def _ask(self, query: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - our own web server
            f"{self.url}/graphql",
            json.dumps({"query": query, "variables": variables}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise DagsterError(f"{self.url} refuses: {error.read().decode(errors='replace')[:500]}") from error
        except (OSError, ValueError) as error:
            raise DagsterError(f"{self.url} does not answer: {error}") from error
        if answer.get("errors"):
            raise DagsterError(f"Dagster refuses: {answer['errors'][0].get('message')}")
        data: dict[str, Any] = answer["data"]
        return data


def _run(told: Mapping[str, Any]) -> Run:
    tags = {tag["key"]: tag["value"] for tag in told["tags"]}
    steps = [
        Step(step["stepKey"].rpartition(".")[2], step["startTime"], step["endTime"]) for step in told["stepStats"] or ()
    ]
    return Run(
        told["runId"],
        told["status"],
        told["jobName"],
        tags.get("pipeline_platform.origin/flights"),
        int(tags.get("pipeline_platform.demand/flights", 0)),
        told["startTime"],
        told["endTime"],
        tuple(sorted(steps, key=lambda step: step.started or float("inf"))),
    )
