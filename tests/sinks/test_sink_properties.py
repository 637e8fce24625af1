"""Runs that end at any point, with a sink: PostgreSQL has the rows of the lake, each once."""

from collections import Counter
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline_platform.run.flow import Flow
from pipeline_platform.sinks.postgres import PostgresSink
from tests.fixtures.flow import rows, run
from tests.fixtures.moody import Mood, Moody
from tests.run import test_whole_run_properties
from tests.run.test_whole_run_properties import CHANGES, ENDS, MESSAGES, check, flows, run_to_end

__all__ = ["flows"]


@pytest.mark.parametrize("examples", [4, pytest.param(200, marks=pytest.mark.soak)])
def test_wherever_runs_end_the_sink_has_each_row_of_the_lake_once(flows, postgres_url, monkeypatch, examples):
    monkeypatch.setattr(test_whole_run_properties, "CHANGES", [*CHANGES, (PostgresSink, "publish")])

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(MESSAGES, ENDS, st.booleans())
    def tried(messages: list[Mood], ends: list[test_whole_run_properties.Point], is_replayed: bool) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        with closing(PostgresSink(name="warehouse", url=postgres_url)) as sink:
            without = flows(Moody, messages)

            def with_sink() -> Flow:
                return replace(without(), sinks=dict.fromkeys(Moody.batchers, sink))

            last = run_to_end(with_sink, ends)
            check(messages, last)
            if is_replayed:
                run(with_sink(), "messages")
        with psycopg.connect(postgres_url) as connection:
            for batcher in Moody.batchers:
                found = connection.execute(f"SELECT message_id, receive_id FROM moody_{batcher}").fetchall()
                assert Counter(found) == Counter(rows(last, batcher).select("message_id", "receive_id").rows())

    tried()
