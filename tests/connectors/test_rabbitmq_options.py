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
from pydantic import ValidationError

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


@pytest.mark.parametrize(
    "url", ["", "rabbit.example", "http://rabbit.example", f"amqp://user:{SECRET}@", f"amqp://user:{SECRET}@host:port"]
)
def test_a_url_is_an_amqp_address_and_a_wrong_one_is_not_printed(url):
    with pytest.raises(ValidationError, match=r"url\n.*must be amqp://user:password@host:port/vhost") as refused:
        source(url=url)
    assert SECRET not in str(refused.value)


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": ""}, r"queue\n.*at least 1 character"),
        ({"url": f"{URL}&hartbeat=5"}, r"url\n.*Did you mean 'heartbeat'\?"),
        ({"url": f"{URL}&heartbeat=30"}, r"url\n.*'heartbeat' must be given once"),
        ({"url": "amqp://h/?heartbeat=x"}, r"url\n.*'heartbeat' .* a whole number from 0 to 65,535"),
        ({"url": "amqp://h/?frame_max=1"}, r"url\n.*'frame_max' .* from 4,096 to 131,072"),
        ({"url": "amqp://h/?socket_timeout=inf"}, r"url\n.*'socket_timeout' .* seconds"),
        ({"url": "amqp://h/?tcp_options=[1]"}, r"url\n.*'tcp_options' .* dict"),
        ({"prefetch_count": 0}, r"prefetch_count\n.*greater than or equal to 1"),
        ({"wait_time_s": 61}, r"wait_time_s\n.*less than or equal to 60"),
        ({"declare": {"exclusive": True}}, r"declare.exclusive\n.*deleted between two runs"),
        ({"declare": {"auto_delete": True}}, r"declare.auto_delete\n.*x-expires"),
        ({"declare": {"arguments": {"x-queue-type": "stream"}}}, r"declare.arguments\n.*x-queue-type is a stream"),
        ({"declare": {"nowait": True}}, r"declare.nowait\n.*Extra inputs"),
        ({"bindings": [{"routing_key": "a"}]}, r"bindings.0.exchange\n.*required"),
        ({"bindings": [{"exchange": "a", "nowait": True}]}, r"bindings.0.nowait\n.*Extra inputs"),
        ({"consume_options": {"no_ack": True}}, r"consume_options.no_ack\n.*Extra inputs"),
        ({"backoff_type": "linear"}, r"backoff_type\n.*'exp', 'rand', 'rand_exp' or 'stop'"),
        ({"backoff_min_s": 0}, r"backoff_min_s\n.*greater than 0"),
        ({"backoff_max_s": 0}, r"backoff_max_s\n.*greater than 0"),
        ({"backoff_min_s": 31}, r"backoff_min_s must not exceed backoff_max_s \(30\), got 31"),
        ({"colour": "red"}, r"colour\n.*Extra inputs"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_by_name(options, said):
    with pytest.raises(ValidationError, match=said):
        source(**options)


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
