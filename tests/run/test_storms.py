"""Four runs at a time, killed and stalled at random: each message once in every table, and none lost."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess

import pytest

from servers.server import Server
from tests.fixtures import fault_run
from tests.fixtures.fault_ground import FILLED, Ground, assert_each_message_once, filled_sqs, filled_table, twice
from tests.fixtures.fault_run import LEASE_S, POINTS
from tests.fixtures.line import line_to

pytestmark = pytest.mark.faults


def storm(ground: Ground, seed: int, runs: int, spared_s: float = 4.0, points: Sequence[str] = ("",)) -> None:
    """Keep four runs going; kill, or stall for longer than a lease, most of them within `spared_s` seconds.

    Each is killed at one of `points`, if it comes so far.
    """
    chance = random.Random(seed)
    living: list[tuple[BaseProcess, float]] = []
    asleep: list[tuple[BaseProcess, float]] = []
    started = 0
    while started < runs or living or asleep:
        now = time.monotonic()
        while started < runs and len(living) + len(asleep) < 4:
            living.append((ground.start(chance.choice(points)), now + chance.uniform(0.3, spared_s)))
            started += 1
        for process, hit_at in list(living):
            if not process.is_alive():
                living.remove((process, hit_at))
            elif now >= hit_at:
                living.remove((process, hit_at))
                if chance.random() < 0.5:
                    process.kill()
                    process.join()
                else:
                    send(process, signal.SIGSTOP)
                    asleep.append((process, now + LEASE_S * chance.uniform(0.5, 2.5)))
        for process, wake_at in list(asleep):
            if now >= wake_at:
                asleep.remove((process, wake_at))
                send(process, signal.SIGCONT)
                living.append((process, now + chance.uniform(0.3, 6.0)))
        time.sleep(0.02)


def send(process: BaseProcess, sent: int) -> None:
    """Send a signal to a run, unless it has just ended."""
    with suppress(ProcessLookupError):
        os.kill(process.pid or 0, sent)


@contextmanager
def failing(servers: Sequence[Server], seed: int) -> Iterator[None]:
    """Stop or kill one of several runs repeatedly, each time briefly; at the end all run."""
    chance, is_over = random.Random(seed), threading.Event()

    def fail() -> None:
        while not is_over.wait(chance.uniform(2.0, 12.0)):
            server = chance.choice(servers)
            chance.choice([server.stop, getattr(server, "kill", server.stop)])()
            is_over.wait(chance.uniform(0.0, 3.0))
            server.start()

    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(fail)
        try:
            yield
        finally:
            is_over.set()
    failed.result()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_a_storm_of_kills_and_stalls_over_a_table(tmp_path, warm_spark, seed):
    ground = filled_table(tmp_path, warm_spark, 1_500)
    storm(ground, seed, runs=10)
    fault_run.run_to_end(ground.place, ground.left)
    assert_each_message_once(ground, 1_500)


MESSAGES = 300
"""Messages are visible again while their run lives, so that two live runs hold the same ones: only the decision's
compare-and-swap keeps them apart. A storm without it finds messages twice."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
def test_a_storm_of_kills_and_stalls_over_sqs(tmp_path, warm_spark, sqs_server, sqs_queue, seed):
    ground = filled_sqs(tmp_path, warm_spark, sqs_queue(), sqs_server, MESSAGES, visibility=1)
    storm(ground, seed, runs=10)
    # A lease shorter than a run is never acknowledged in time.
    lasting = ground.place.source.model_copy(update={"visibility_timeout": 4, "lease_s": 4.0})
    fault_run.run_to_end(replace(ground.place, source=lasting), ground.left)
    assert_each_message_once(ground, MESSAGES)


@pytest.mark.timeout(900)  # a server takes seconds to start, and on a machine under load many
@pytest.mark.parametrize("server", FILLED)
def test_a_storm_of_kills_and_stalls_over_a_server_that_fails_now_and_then(request, tmp_path, warm_spark, server):
    own: Server = request.getfixturevalue(f"own_{server}_server")
    with line_to(own.address) as line:
        goes_by_a_line = server != "kafka"  # whose clients go to the address that the server tells them
        ground = FILLED[server](tmp_path, warm_spark, line.address if goes_by_a_line else own.address, 1_000)
        with failing([own, line] if goes_by_a_line else [own], seed=0):
            storm(ground, seed=0, runs=6, spared_s=20.0, points=["", *POINTS])
        fault_run.run_to_end(ground.place, ground.left, deadline_s=300)
        assert_each_message_once(ground, 1_000)


@pytest.mark.soak
def test_without_compare_and_swap_a_storm_finds_messages_twice(tmp_path, warm_spark, sqs_server, sqs_queue):
    """The storms can fail, and the decision is what prevents it."""
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        ground = filled_sqs(folder, warm_spark, sqs_queue(), sqs_server, MESSAGES, visibility=1)
        storm(blind := replace(ground, blind=True), seed, runs=10, spared_s=20.0)  # runs must come to their decisions
        if twice(blind):
            return
    raise AssertionError("twenty storms and not one message twice")
