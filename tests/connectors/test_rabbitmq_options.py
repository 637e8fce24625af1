"""Options of RabbitMQ as a source: validation, and explanations of the errors of a real server."""

from ssl import SSLEOFError
from typing import Any
from uuid import uuid4

import pika
import pytest
from pika.exceptions import (
    ConnectionClosedByBroker,
    IncompatibleProtocolError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
    StreamLostError,
)

from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.rabbitmq.rabbitmq_connection import Channel
from pipeline_platform.connectors.rabbitmq.rabbitmq_options import PARAMETERS, explained
from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.source.pauses import Patience
from tests.fixtures.received import received

SECRET = "hush-this-is-secret"
URL = f"amqps://user:{SECRET}@rabbit.example:5671/flights?heartbeat=30"


def source(**options: Any) -> RabbitmqSource:
    return RabbitmqSource(**{"name": "flights", "url": URL, "queue": "flights", **options})


def test_url_parameters_are_the_parameters_of_pika():
    prefix = "_set_url_"
    known = {name.removeprefix(prefix) for name in dir(pika.URLParameters) if name.startswith(prefix)}

    assert known == {*PARAMETERS}, f"tried with pika 1.4.4; this is {pika.__version__}"


def test_client_properties_of_a_url_reach_the_server_with_the_connection_name(rabbitmq_server, rabbitmq_queue, built):
    source = built(
        f"{rabbitmq_server}?client_properties={{'team':'orders'}}", rabbitmq_queue(), connection_name="a run"
    )
    source.backlog()

    assert source._opened.connection is not None
    told = source._opened.connection._pika.params.client_properties
    assert told == {"team": "orders", "connection_name": "a run"}


def test_a_run_waits_for_a_server_according_to_the_backoff_options():
    assert source().patience == Patience("rand_exp", 1.0, 30.0, 60.0)
    assert source(backoff_type="exp", backoff_min_s=2, backoff_max_s=8).patience == Patience("exp", 2.0, 8.0, 60.0)


# Errors of a real server


@pytest.mark.parametrize(
    ("changed", "options", "error", "said"),
    [
        (("guest:guest", f"guest:{SECRET}"), {}, SourceError, "rejected user 'guest'.*Correct user and password"),
        (("%2F", "nowhere"), {}, SourceError, "virtual host 'nowhere' at .* does not exist"),
        (("amqp:", "amqps:"), {}, SourceError, "uses another protocol"),
        (("127.0.0.1", "no-such-host.invalid"), {}, SourceAwayError, "the host no-such-host.* in url is unknown"),
        ((":", ":"), {"queue": "nowhere"}, SourceError, "queue 'nowhere' does not exist .*or set declare"),
        ((":", ":"), {"declare": {"durable": False}}, SourceError, "declare .*do not match queue .*inequivalent"),
        ((":", ":"), {"bindings": [{"exchange": "no"}]}, SourceError, "an exchange does not exist .*after_connect"),
    ],
)  # fmt: skip
def test_errors_name_the_option_and_the_fix(
    rabbitmq_server, rabbitmq_queue, built,
    changed, options, error, said
):  # fmt: skip
    options = {"queue": rabbitmq_queue(), **options}
    asked = built(rabbitmq_server.replace(*changed), **options)

    with pytest.raises(error, match=f"source 'flights': .*{said}") as refused:
        asked.backlog()
    assert SECRET not in str(refused.value)


def test_an_exclusive_consumer_is_named(rabbitmq):
    first = rabbitmq(consume_options={"exclusive": True}, wait_time_s=1.0)
    first.send([b"1"])
    batches = first.read(first.plan(10, 1, "r1")[0], "r1")
    next(batches)
    first.send([b"2"])

    with pytest.raises(SourceError, match=r"queue .* has an exclusive consumer"):
        received(rabbitmq(first.queue, consume_options={"exclusive": True}, wait_time_s=1.0))
    assert sum(batch.num_rows for batch in batches) == 1


def test_an_exclusive_queue_of_another_connection_is_named(rabbitmq):
    class Owner(RabbitmqSource):
        def after_connect(self, channel: Channel) -> None:
            channel.ask("queue_declare", queue=self.queue, exclusive=True)

    owner = rabbitmq(f"own-{uuid4().hex[:8]}", kind=Owner)
    owner.backlog()

    with pytest.raises(SourceError, match=r"is exclusive to another connection .*not exclusive"):
        rabbitmq(owner.queue).backlog()


def test_a_stream_is_refused_by_name(rabbitmq):
    class Streaming(RabbitmqSource):
        def after_connect(self, channel: Channel) -> None:
            channel.ask("queue_declare", queue=self.queue, durable=True, arguments={"x-queue-type": "stream"})

    stream = rabbitmq(f"stream-{uuid4().hex[:8]}", kind=Streaming)

    for ask in stream.backlog, stream.check_ready, lambda: received(stream):
        with pytest.raises(SourceError, match="is a stream: it delivers every message to every consumer"):
            ask()


def test_a_consumer_timeout_names_the_option_to_raise():
    class TooLateError(Exception):
        reply_code = 406
        reply_text = "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out"

    error = explained(TooLateError(), source())

    assert isinstance(error, SourceAwayError)
    assert "consumer_timeout" in str(error)


LOST, REFUSED = repr(StreamLostError("Transport indicated EOF")), repr(ConnectionClosedByBroker(403, "ACCESS_REFUSED"))
GUESSES = [IncompatibleProtocolError, ProbableAuthenticationError, ProbableAccessDeniedError]
"""Errors that pika raises for a lost connection, by its phase; only the server's own errors are certain."""


@pytest.mark.parametrize("error", [*(guess(LOST) for guess in GUESSES), SSLEOFError(8, "EOF occurred")], ids=repr)
def test_a_connection_lost_while_opening_is_a_transient_error(error):
    told = explained(error, source())

    assert isinstance(told, SourceAwayError)
    assert "Start the server, or correct url" in str(told)


@pytest.mark.parametrize("guess", GUESSES[1:])
def test_a_refusal_by_the_server_is_a_permanent_error(guess):
    assert not isinstance(explained(guess(REFUSED), source()), SourceAwayError)


def test_an_error_of_a_subclass_is_raised_unchanged_and_leaves_no_connection(rabbitmq):
    class Wrong(RabbitmqSource):
        def after_connect(self, channel: Channel) -> None:
            raise LookupError("no plan")

    wrong = rabbitmq(kind=Wrong)

    with pytest.raises(LookupError, match="no plan"):
        wrong.backlog()
    assert wrong._opened.connection is None
