"""Dead letters of whole runs: sent on, counted, and said where they could not be."""

import dagster as dg

from pipeline_platform.connectors.table_queue import TableQueue
from tests.fixtures.dagster import WINDOW, Location, figures
from tests.fixtures.pipelines_under_test import Lettered

SUCCESS = dg.DagsterRunStatus.SUCCESS


def test_a_dead_message_is_sent_on_once_its_queue_is_there(location: Location) -> None:
    location.enqueue("fail", "one")

    away = location.run("lettered_pull")

    assert away.status == SUCCESS
    told = location.checks(away)["acknowledged"]
    assert not told.passed
    assert "1 dead letters are not sent: the next run sends them." in told.description
    assert (location.waiting(), location.open_failures(pipeline=Lettered)) == (0, {WINDOW: 1})
    (event,) = location.materialisations(away, "failed", "lettered")
    assert {name: figures(event)[name] for name in ("open", "dead", "failed")} == {"open": 1, "dead": 1, "failed": 1}
    assert location.checks(away)["no_open_failures"].metadata["dead"].value == 1

    url = f"sqlite:///{location.root}/letters.sqlite"
    letters = TableQueue(name="letters", url=url, metadata_column="said")
    letters.create()
    again = location.run("lettered_pull")

    assert location.checks(again)["acknowledged"].passed
    ((row,),) = [batch.to_pylist() for share in letters.plan(9, 1, "r") for batch in letters.read(share, "r")]
    assert row["data"] == b"fail"
    assert '"pipeline": "lettered"' in row["metadata"]
    assert location.flow(Lettered).ledger.unfinished() == []
