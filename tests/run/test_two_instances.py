"""Two Dagster instances, each with its own control store, that were set on one lake and one queue by mistake."""

import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.decision import FencedError
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import finish, handled, rows, run
from tests.fixtures.pipelines_under_test import Told


def test_instances_that_share_a_lake_lose_nothing_and_write_nothing_twice(filled, tmp_path):
    """Neither knows the other's claims: the one gives up what the other has at work, which then ends red."""
    one = filled(Told, [b"a", b"b"])
    other = Flow(one.pipeline, one.source, one.lake, ControlStore(f"sqlite:///{tmp_path}/other.sqlite"), one.session)
    at_work = handled(one)

    one.source.enqueue([b"c"])
    run(other)
    with pytest.raises(FencedError, match="given up"):
        finish(one, at_work)
    run(other)

    assert sorted(rows(other, "lines")["text"]) == ["a", "b", "c"]
    assert one.source.backlog().messages == 0
