"""Calls of sources by sensors: one at a time, and for a limited time."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from pipeline_platform.orchestration.sensors.timely_calls import is_late, timely
from pipeline_platform.source.contract import SourceAwayError


def test_calls_of_several_sensors_follow_each_other():
    source: Any = Mock()
    inside, most = [0], []

    def call() -> int:
        inside[0] += 1
        most.append(inside[0])
        time.sleep(0.05)
        inside[0] -= 1
        return 7

    with ThreadPoolExecutor(8) as sensors:
        answers = list(sensors.map(lambda name: timely(source, name, call, 30), ["backlog", "wait"] * 4))

    assert answers == [7] * 8
    assert max(most) == 1


def test_the_result_of_a_late_call_is_read_once_and_other_calls_do_not_wait_for_it():
    source: Any = Mock()
    released = threading.Event()

    def late() -> str:
        released.wait(30)
        return "late"

    with pytest.raises(SourceAwayError, match="backlog has not returned yet"):
        timely(source, "backlog", late, 0.01)
    with pytest.raises(SourceAwayError, match="backlog has not returned yet"):
        timely(source, "wait", lambda: "never called", 0.01)
    with pytest.raises(SourceAwayError):
        timely(source, "backlog", lambda: "never called", 0.1)
    assert is_late(source, "backlog")
    released.set()
    time.sleep(0.2)
    assert timely(source, "wait", lambda: "now", 30) == "now"
    assert timely(source, "backlog", lambda: "another", 30) == "late"
    assert timely(source, "backlog", lambda: "another", 30) == "another"
    assert not is_late(source, "backlog", "wait")


def test_an_error_of_the_source_is_raised_and_not_kept():
    source: Any = Mock()

    def fails() -> None:
        raise ValueError("as told")

    with pytest.raises(ValueError, match="as told"):
        timely(source, "backlog", fails)
    assert timely(source, "backlog", lambda: 3) == 3
