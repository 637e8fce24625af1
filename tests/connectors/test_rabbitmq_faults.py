"""Failures of RabbitMQ: stops, restarts, closed connections and crashed processes lose nothing and are explained."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pika
import pytest

from pipeline_platform.connectors.rabbitmq import mailboxes, rabbitmq_source
from pipeline_platform.source.contract import Share, SourceAwayError, SourceError
from pipeline_platform.source.patience import patiently
from pipeline_platform.source.pauses import Patience
from servers import rabbitmq as broker
from servers.rabbitmq import RabbitMQ
from tests.fixtures.line import line_to
from tests.fixtures.rabbitmq import create_queue
from tests.fixtures.rabbitmq_source import acknowledged, numbers, texts
from tests.fixtures.received import received
from tests.fixtures.servers import ready

SOON = Patience("rand", 0.1, 0.3, 60.0)


@pytest.fixture(scope="module")
def own_server(servers_folder):
    """One server for all tests of the file. A test that stops it starts it again."""
    ready(broker)
    with broker.serve(servers_folder) as running:
        yield running


@pytest.fixture
def server(own_server):
    return own_server


@pytest.fixture
def queue(server, built):
    """Build sources of the same queue on a server that the test may stop."""
    name = create_queue(server.address)
    return lambda **options: built(server.address, name, **options)


@contextlib.contextmanager
def restarting(server: RabbitMQ) -> Iterator[None]:
    """Stop the server, and start it again some time after the block started."""
    server.stop()
    thread = threading.Thread(target=server.start)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_restart_during_acknowledgement_keeps_earlier_acknowledgements(server, queue, caplog):
    source = queue()
    source.send(numbers(20))
    rows = received(source)
    assert acknowledged(source, "ack", rows[:8]) == []

    with restarting(server), caplog.at_level(logging.WARNING, "pipeline_platform.connectors.rabbitmq.rabbitmq_source"):
        refused = [entry for start in (8, 14) for entry in acknowledged(source, "ack", rows[start : start + 6])]
        again = patiently(lambda: received(source), SOON)

    assert [entry.lost for entry in refused] == [True] * 12
    assert len([record for record in caplog.records if "Not acknowledged" in record.getMessage()]) == 1
    assert [row["message_id"] for row in again] == [row["message_id"] for row in rows[8:]]
    assert all(row["redelivered"] for row in again), "what may have been decided is looked up"


def test_a_closed_connection_loses_the_messages_of_the_run_but_not_the_sensor(server, queue):
    source, sensor = queue(connection_name="the run's"), queue(connection_name="the sensor's")
    source.send(numbers(5))
    assert sensor.backlog().messages == 5
    rows = received(source)
    assert "the run's" in server.ctl("list_connections", "client_properties")
    server.ctl("close_all_connections", "told to")
    _until(lambda: source._opened.connection is not None and not source._opened.connection.is_open)

    refused = acknowledged(source, "ack", rows)

    assert [entry.lost for entry in refused] == [True] * 5
    assert "CONNECTION_FORCED - told to" in refused[0].reason
    assert patiently(sensor.backlog, SOON).messages == 5, "it connects anew"


def test_a_queue_deleted_during_a_receive_loses_no_received_message(server, queue, monkeypatch, caplog):
    source = queue(wait_time_s=10.0)
    source.send(numbers(5))
    batches = source.read(Share(messages=50), "r1")
    rows = next(batches).to_pylist()

    server.ctl("delete_queue", source.queue)
    rest = list(batches)

    assert (len(rows), rest) == (5, [])
    assert "was deleted or moved" in caplog.text
    assert [entry.lost for entry in acknowledged(source, "ack", rows)] == [True] * 5, "the server would take anything"
    with pytest.raises(SourceError, match=r"does not exist .*Create it"):
        received(source)
    connection = source._opened.connection
    queue(declare={}).backlog()
    source.send([b"new"])
    assert texts(received(source, 1)) == ["new"], "by another consumer, on a channel of its own"
    assert source._opened.connection is connection


def test_a_queue_deleted_before_the_first_message_is_an_error(server, queue):
    source = queue(wait_time_s=10.0)
    source.backlog()
    timer = threading.Timer(0.5, server.ctl, ["delete_queue", source.queue])
    timer.start()

    with pytest.raises(SourceError, match=r"was deleted or moved|does not exist"):
        received(source)
    timer.join()


def test_an_unavailable_server_is_an_error_at_once_and_a_run_waits_for_it(server, queue, built):
    source = queue()
    source.send([b"1"])
    source.close()
    transient = built(server.address, "transient", declare={"durable": False})
    transient.backlog()
    with restarting(server):
        with pytest.raises(SourceAwayError, match=r"127.0.0.1:\d+ does not answer.*Start the server, or correct url"):
            source.backlog()
        patiently(source.check_ready, SOON)

    assert texts(received(source)) == ["1"]
    assert transient.backlog().messages == 0, "a queue that went with the server is declared anew"


def test_a_connection_lost_while_opening_is_retried(rabbitmq_server, rabbitmq_queue, built):
    with line_to(rabbitmq_server) as line:
        source = built(line.address, rabbitmq_queue())
        line.stop()
        with pytest.raises(SourceAwayError, match=r"closed the connection before it was open .*Start the server, or"):
            source.backlog()

        threading.Timer(0.5, line.start).start()
        assert patiently(source.backlog, SOON).messages == 0
        source.close()


def test_a_connection_survives_work_that_exceeds_its_heartbeat_timeout(rabbitmq_server, rabbitmq_queue, built):
    source = built(f"{rabbitmq_server}?heartbeat=1", rabbitmq_queue())
    source.send(numbers(3))
    rows = received(source)

    time.sleep(3)  # the server closes a connection after two seconds without a sign of life

    assert acknowledged(source, "ack", rows) == []
    source.close()
    assert source.backlog().messages == 0


def test_a_stalled_reader_pauses_the_socket_but_not_the_heartbeats(rabbitmq_server, rabbitmq_queue, built, monkeypatch):
    monkeypatch.setattr(mailboxes, "BATCH_BYTES", 2**20)
    source = built(f"{rabbitmq_server}?heartbeat=1", rabbitmq_queue())
    source.send([os.urandom(2**20)] * 64)
    batches = source.read(Share(messages=64), "r1")
    next(batches)

    time.sleep(3)
    ((_, inbox),) = source._opened.inboxes.values()
    held = len(inbox._full)

    assert sum(batch.num_rows for batch in batches) == 63
    assert 0 < held < 32


def test_a_forked_process_does_not_wait_for_the_thread_of_its_parent(rabbitmq):
    source = rabbitmq()
    source.send([b"1"])
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(source.backlog().messages))
    process.start()

    assert ours.poll(60)
    assert ours.recv() == 1
    process.join()
    assert source.backlog().messages == 1


def test_a_server_that_stops_answering_times_out(monkeypatch, server, queue):
    monkeypatch.setattr(rabbitmq_source, "LOOK_S", 0.5)
    source = queue()
    source.backlog()
    with pika.BlockingConnection(pika.URLParameters(server.address)):
        pass
    halted = [int(pid) for pid in server.ctl("eval", "os:getpid().").split('"')[1:2]]
    os.kill(halted[0], signal.SIGSTOP)
    try:
        with pytest.raises(SourceAwayError, match="does not answer"):
            source.backlog()
    finally:
        os.kill(halted[0], signal.SIGCONT)
    assert patiently(source.backlog, SOON).messages == 0


def test_a_queue_that_does_not_start_to_send_times_out(monkeypatch, server, built):
    monkeypatch.setattr(rabbitmq_source, "LOOK_S", 2.0)
    name = create_queue(server.address, x_queue_type="quorum")
    source = built(f"{server.address}?heartbeat=1", name, wait_time_s=1.0)
    source.send(numbers(3))
    leader = f'list_to_atom("%2F_{name}")'
    server.ctl("eval", f"sys:suspend({leader}).")
    try:
        with pytest.raises(SourceAwayError, match="no answer within 2 s"):
            received(source)
    finally:
        server.ctl("eval", f"sys:resume({leader}).")

    _until(lambda: source.backlog().messages == 3)  # its connection is not heard from any more
    assert texts(received(source)) == ["0", "1", "2"]


def test_a_consumer_timeout_prevents_the_decision_of_messages_without_an_id(server, queue):
    """The last test of the file, because the timeout stays."""
    server.ctl(
        "eval",
        "application:set_env(rabbit, consumer_timeout, 1), application:set_env(rabbit, channel_tick_interval, 100).",
    )
    source = queue()
    source.send(numbers(3), [{"message_id": None}] * 3)
    rows = received(source)
    _until(lambda: any(inbox.channel.ended for _, inbox in source._opened.inboxes.values()))

    with pytest.raises(SourceError, match=r"406 PRECONDITION_FAILED.*max_demand.*consumer_timeout.*have no id") as late:
        source.extend("r1", lambda: [(rows[0]["ack_ref"], [row["ack_id"] for row in rows])])

    assert not isinstance(late.value, SourceAwayError), "to ask once more would not help"


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
