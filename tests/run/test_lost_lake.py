"""A lake without the tables of earlier runs is refused before any lease, unless it is meant to be new."""

import shutil
from pathlib import Path

import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import begun, flow_of, rows, run
from tests.fixtures.flow_pipelines import Obedient


@pytest.fixture
def flow(filled):
    flow = filled(Obedient, [b"one", b"two"])
    run(flow)
    flow.source.enqueue([b"three"])
    return flow


def on(flow: Flow, root: Path, control: ControlStore | None = None) -> Flow:
    """The same pipeline with its lake at another root."""
    return Flow(BoundProducer(flow.pipeline), flow.source, Lake(root=str(root)), control or flow.control, flow.session)


def test_an_empty_lake_beside_a_used_control_store_is_refused_and_nothing_is_leased(flow, tmp_path):
    lost = on(flow, tmp_path / "not-mounted")
    for origin in ("source", "failed", "messages"):
        with pytest.raises(PipelineError, match=r"has no table obedient/outcomes, .*Mount or restore"):
            begun(lost, origin=origin)
    assert flow.source.backlog().messages == 1
    assert not (tmp_path / "not-mounted").exists()


def test_a_lake_that_was_moved_or_restored_is_taken(flow, tmp_path):
    shutil.copytree(flow.lake.root, tmp_path / "copy")
    moved = on(flow, tmp_path / "copy")
    run(moved)
    assert rows(moved, "words").height == 3


def test_an_empty_lake_with_a_new_control_store_is_a_new_deployment(flow, tmp_path):
    (tmp_path / "new").mkdir()
    new = flow_of(tmp_path / "new", flow.pipeline, flow.source, session=flow.session)
    run(new)
    assert rows(new, "words").height == 1


def test_a_pipeline_that_never_finished_a_receive_may_begin_in_any_lake(flow, tmp_path):
    class Others(Obedient):
        name = "others"

    begun(Flow(BoundProducer(Others), flow.source, Lake(root=str(tmp_path / "any")), flow.control, flow.session))
