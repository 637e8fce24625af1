"""Runs whose events may quote messages: reasons of failures, ids, batch keys, and the output of callbacks."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain

import dagster as dg

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.graph import asset_keys

_AT_ONCE = 1_000


def quoting_runs(
    instance: dg.DagsterInstance, pipeline: type[Pipeline], windows: Sequence[str], texts: Sequence[str]
) -> list[str]:
    """Return the runs that reported some windows and whose config or events contain one of the texts as words."""
    forms = sorted({form for text in texts for form in (text, dg.serialize_value(text)[1:-1])})
    quoted = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, forms))})(?!\w)")
    runs = dict.fromkeys(_reporting(instance, pipeline, windows)) if windows and forms else {}
    return [run_id for run_id in runs if any(map(quoted.search, _texts_of(instance, run_id)))]


def _reporting(instance: dg.DagsterInstance, pipeline: type[Pipeline], windows: Sequence[str]) -> Iterator[str]:
    for asset in asset_keys(pipeline).values():
        of_windows = dg.AssetRecordsFilter(asset, asset_partitions=list(windows))
        for fetch in (instance.fetch_materializations, instance.fetch_observations):
            cursor, is_more = None, True
            while is_more:
                found = fetch(of_windows, limit=_AT_ONCE, cursor=cursor)
                cursor, is_more = found.cursor, found.has_more
                yield from (record.run_id for record in found.records if record.run_id)


def _texts_of(instance: dg.DagsterInstance, run_id: str) -> Iterator[str]:
    run = instance.get_run_by_id(run_id)
    events = map(dg.serialize_value, instance.all_logs(run_id))
    return chain([] if run is None else [json.dumps(run.run_config)], events)
