"""Receives that cannot be finished: reported, skipped and kept, without effect on other runs."""

import os
import re
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.maintenance.maintenance import SAFE_AGE, maintain
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Retention
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.contract import LeasedIds, SourceError
from tests.fixtures.flow import no_spark
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Run, numbered, visible

Break = Callable[[Path], None]


@pytest.fixture
def flow(tables, tmp_path):
    return Flow(
        BoundProducer(Keeping), Memory(), tables.lake, ControlStore(f"sqlite:///{tmp_path}/control.sqlite"), no_spark
    )


def decided(tables: Tables, receive_id: str, *payloads: bytes) -> Run:
    deliveries = tuple((f"{receive_id}-{n}", data) for n, data in enumerate(payloads))
    return Run(tables, Memory(deliveries_=deliveries), receive_id).work().decide()


def garbage(name: str) -> Break:
    return lambda receives: (receives / "broken" / name).write_bytes(b"PAR1 no more")  # type: ignore[return-value]


def corrupt_table(receives: Path) -> None:
    log = receives.parent / "kept" / "_delta_log" / f"{0:020d}.json"
    log.write_text("{")


BROKEN: dict[str, tuple[Break, str]] = {
    "its record": (garbage("receive.json"), r"_receives/broken/receive\.json: not a valid record.*Restore it"),
    "a manifest": (garbage("handle.parquet"), r"_receives/broken/handle\.parquet: not a valid manifest.*Restore it"),
    "its batcher's table": (corrupt_table, "Error"),
}


def begun(flow: Flow) -> list[str]:
    told: list[str] = []
    begin(flow, origin="source", run_id="next", windows=[WINDOW], demand=1, log=told.append)
    for claim in flow.control.in_flight("keeping"):
        flow.control.end(claim.receive_id)
    return [said for said in told if "Could not finish" in said]


@pytest.mark.parametrize("what", BROKEN)
def test_a_receive_that_cannot_be_finished_is_reported_each_time_and_the_others_are_finished(
    tables, flow, what, tmp_path, monkeypatch
):
    break_it, said = BROKEN[what]
    decided(tables, "broken", b"one", b"two")
    if what == "its batcher's table":  # renamed since, so the other tables of the pipeline are intact

        class Renamed(Keeping):
            batchers = {"texts": Keeping.batchers["kept"]}

        flow = Flow(BoundProducer(Renamed), flow.source, flow.lake, flow.control, flow.session)
    receives = Path(tables.lake.uri("keeping", "_receives"))
    shutil.copytree(tables.lake.uri("keeping"), tmp_path / "backup")
    break_it(receives)
    flow.tables.ensure()
    other = Run(flow.tables, Memory(deliveries_=numbered(b"three")), "well").work().decide()

    for _ in range(2):
        (report,) = begun(flow)
        assert "receive broken" in report
        assert re.search(said, report)

    assert other.ledger.get("well") is None, "finished"
    for name in ("_receives/broken", "kept/_delta_log"):
        shutil.copytree(tmp_path / "backup" / name, Path(tables.lake.uri("keeping", name)), dirs_exist_ok=True)
    assert begun(flow) == []
    assert {"one", "two"} <= {row["text"] for row in visible(tables, "kept")}


def test_a_failed_release_is_retried_by_the_next_run(tables, flow, monkeypatch):
    run = Run(tables, Memory(deliveries_=numbered(b"one")), "broken").work()

    def refuse(source: Memory, receive_id: str, held: LeasedIds) -> None:
        raise SourceError("memory: told to refuse")

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "abandon", refuse)
        (report,) = begun(flow)
    assert report.endswith("SourceError: memory: told to refuse")
    assert run.ledger.get("broken"), "the next run asks again"

    assert begun(flow) == []
    assert run.ledger.get("broken") is None


@pytest.mark.parametrize("what", ["its record", "a manifest"])
def test_maintenance_keeps_files_that_may_belong_to_a_broken_receive(tables, flow, what):
    for receive_id in ("r1", "r2"):
        Run(tables, Memory(deliveries_=((receive_id, b"x"),)), receive_id).finish()
    run = decided(tables, "broken", b"one")
    folder = Path(tables.lake.uri("keeping", "_receives", "broken"))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    BROKEN[what][0](folder.parent)
    old = time.time() - (SAFE_AGE * 2).total_seconds()
    for path in Path(tables.lake.root).rglob("*.parquet"):
        os.utime(path, (old, old))
    run.receive = run.receive.model_copy(update={"started_at": run.receive.started_at - SAFE_AGE * 3})
    if what == "a manifest":
        run.ledger.begin(run.receive)
    told: list[str] = []

    report = maintain(tables, Retention(messages=timedelta(seconds=1)), log=told.append)

    assert report["kept"]["compacted"] == 2
    assert [said for said in told if "not a valid record" in said] == told
    assert len(told) == (what == "its record")
    for path, content in before.items():
        path.write_bytes(content)
    assert begun(flow) == []
    assert "one" in {row["text"] for row in visible(tables, "kept")}


def test_messages_of_a_broken_receive_are_not_acknowledged_before_they_are_published(tables, flow):
    """Another run has leased its messages: acknowledged there, they would be lost if the receive is never fixed."""
    late = Run(tables, Memory(deliveries_=(("broken-0", b"one"), ("own", b"two"))), "late").work()
    decided(tables, "broken", b"one")
    manifest = Path(tables.lake.uri("keeping", "_receives", "broken", "handle.parquet"))
    kept = manifest.read_bytes()
    manifest.write_bytes(b"")
    late.decide().publish()

    answer = steps.acknowledge(flow, late.receive)

    assert flow.source.told == [("ack", "q", ["ack-own"])]  # type: ignore[attr-defined]
    assert (answer.acknowledged, answer.unacknowledged) == (1, 1)
    assert "handle.parquet: not a valid manifest" in answer.errors[0]
    assert late.ledger.get("late") is None, "it comes again by itself"
    manifest.write_bytes(kept)
    again = Run(tables, Memory(deliveries_=(("broken-0", b"one"),)), "again", base=0).work().decide().publish()
    assert steps.acknowledge(flow, again.receive).acknowledged == 1
    assert sorted(row["text"] for row in visible(tables, "kept")) == ["one", "two"]
