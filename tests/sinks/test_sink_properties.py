"""Runs that end at any point, with a sink: it has the rows of the lake, each once."""

from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import rows, run
from tests.fixtures.moody import Mood, Moody
from tests.run import test_whole_run_properties
from tests.run.test_whole_run_properties import CHANGES, ENDS, MESSAGES, check, flows, run_to_end
from tests.sinks.test_sink_contract import SINKS

__all__ = ["flows"]


@pytest.mark.parametrize(
    ("name", "examples"),
    [("postgresql", 4), *(pytest.param(name, 200, marks=pytest.mark.soak) for name in ("postgresql", "iceberg"))],
)
def test_wherever_runs_end_the_sink_has_each_row_of_the_lake_once(flows, request, monkeypatch, name, examples):
    new, store = SINKS[name](request)
    monkeypatch.setattr(test_whole_run_properties, "CHANGES", [*CHANGES, (type(new()), "publish")])

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(MESSAGES, ENDS, st.booleans())
    def tried(messages: list[Mood], ends: list[test_whole_run_properties.Point], is_replayed: bool) -> None:
        with closing(new()) as sink:
            without = flows(Moody, messages)

            def with_sink() -> Flow:
                return replace(without(), sinks=dict.fromkeys(Moody.batchers, sink))

            last = run_to_end(with_sink, ends)
            check(messages, last)
            if is_replayed:
                run(with_sink(), "messages")
            for batcher in Moody.batchers:
                found = Counter((row["message_id"], row["receive_id"]) for row in store.read(sink, "moody", batcher))
                assert found == Counter(rows(last, batcher).select("message_id", "receive_id").rows())

    tried()
