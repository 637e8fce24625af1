"""The error of a failed step: the reason comes first if it is written for users."""

import dagster as dg
import pytest

from pipeline_platform.lake.decisions.decision import FencedError
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.orchestration.failing import failing_with_reason
from pipeline_platform.run.outages import OutageError
from pipeline_platform.source.contract import SourceError


def first_line(error: Exception) -> str:
    """Return the first line of a failed step's error in Dagster, without the class."""

    @dg.op
    def step() -> None:
        with failing_with_reason():
            raise error

    @dg.job
    def job() -> None:
        step()

    result = job.execute_in_process(raise_on_error=False)
    told = result.failure_data_for_node("step")
    assert told is not None
    assert told.error is not None
    return told.error.message.partition("\n")[0].partition(": ")[2]


@pytest.mark.parametrize(
    "error",
    [PipelineError("no room"), SourceError("no route"), OutageError("away"), FencedError.of("r")],
)
def test_the_first_line_is_the_reason(error):
    assert first_line(error) == f"{type(error).__name__}: {error}"


def test_an_error_that_nobody_wrote_for_users_keeps_its_stack():
    assert "KeyError" not in first_line(KeyError("x"))
