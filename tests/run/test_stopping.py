"""A run that is asked to end by a signal, in the process of the run: what it lets go on, and for how long."""

import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline_platform.run import stopping
from pipeline_platform.run.begin import begin
from tests.fixtures.small_lake import WINDOW, Keeping
from tests.fixtures.telemetry import flow_here


class Quick(Keeping):
    """Stops soon."""

    name = "quick"
    shutdown = timedelta(milliseconds=50)


def test_a_message_that_is_stuck_keeps_its_run_no_longer_than_twice_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_FINISH_S", 0.0)
    monkeypatch.setattr(stopping, "_ASKED", {})
    flow, went_on = flow_here(tmp_path, Quick, [b"stuck"]), []
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])

    def hang() -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(receive)
        time.sleep(20)

    with pytest.raises(KeyboardInterrupt), stopping.heeding(flow, receive):
        hang()

    assert went_on == [receive], "the first signal interrupts nothing"
