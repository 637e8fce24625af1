"""The kit of connectors: clients by process, asyncio clients, errors, metadata, and defaults of leased sources."""

import asyncio
import json
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa
import pytest
from pydantic import Field

from pipeline_platform import (
    AsyncClient,
    Backlog,
    LeasedIds,
    LeasedSource,
    Refused,
    Share,
    SourceAwayError,
    SourceError,
    per_process,
    with_metadata,
)
from pipeline_platform.testing.promises import error_of


class Client:
    """A client that records whether it was closed."""

    made = 0
    is_closed = False

    def __init__(self) -> None:
        type(self).made += 1

    def close(self) -> None:
        self.is_closed = True


class Listed(LeasedSource):
    """A source whose server lists the messages of a receive, and refuses some."""

    password: str = Field("hunter2-secret", repr=False)
    at_server: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()

    @per_process
    def _client(self) -> Client:
        """Return a client."""
        return Client()

    @property
    def places(self) -> frozenset[str]:
        return frozenset({"queue q"})

    @property
    def calls(self) -> list[tuple[str, str, list[str]]]:
        return self.__dict__.setdefault("_calls", [])

    def backlog(self) -> Backlog:
        return Backlog(0)

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        return iter(())

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        return []

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        self.calls.append(("release", ack_ref, list(ack_ids)))
        return []

    def renew(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        self.calls.append(("renew", ack_ref, list(ack_ids)))
        return [Refused(ack_id, "taken", lost=True) for ack_id in ack_ids if ack_id in self.taken]


class Lists(Listed):
    def leased(self, receive_id: str, held: LeasedIds) -> Iterator[tuple[str, Sequence[str]]]:
        if self.at_server:
            yield receive_id, self.at_server


def held():
    return [("q", ["1", "2"]), ("q", ["3"])]


# Clients


def test_a_client_is_made_once_for_all_threads_and_closed_with_the_source():
    source, before = Listed(name="listed"), Client.made
    with ThreadPoolExecutor(8) as pool:
        clients = {id(client) for client in pool.map(lambda _: source._client, range(50))}
    assert (len(clients), Client.made) == (1, before + 1)
    client = source._client

    source.close()
    source.close()

    assert client.is_closed
    assert source._client is not client, "a closed source can be used again"


def test_a_fork_a_pickle_and_a_copy_make_their_own_client():
    source = Listed(name="listed")
    client = source._client
    assert pickle.loads(pickle.dumps(source))._client is not client
    assert source.model_copy(update={"password": "another"})._client is not client
    reading, writing = os.pipe()
    if not (child := os.fork()):
        is_own = source._client is not client
        source.close()
        os.write(writing, json.dumps([is_own, client.is_closed]).encode())
        os._exit(0)
    os.waitpid(child, 0)

    assert json.loads(os.read(reading, 100)) == [True, False]
    assert source._client is client


class Slow(Listed):
    @per_process
    def _client(self) -> Client:
        """Return a client; the first one takes a long time."""
        CREATING.set()
        CONNECTED.wait(60)
        return Client()


CREATING, CONNECTED = threading.Event(), threading.Event()


def test_a_fork_makes_a_client_while_a_thread_of_its_parent_makes_one():
    source = Slow(name="slow")
    thread = threading.Thread(target=lambda: source._client)
    thread.start()
    assert CREATING.wait(60)
    if not (child := os.fork()):
        signal.alarm(30)  # ends a child that waits for ever
        CONNECTED.set()
        os._exit(0 if source._client else 1)
    CONNECTED.set()
    thread.join()

    assert os.waitpid(child, 0)[1] == 0


class Echo:
    """An asyncio client, which answers in the thread of its loop."""

    def __init__(self) -> None:
        self.is_closed, self.thread = False, threading.current_thread()

    async def echo(self, value: str, after_s: float = 0.0) -> str:
        await asyncio.sleep(after_s)
        return value

    async def close(self) -> None:
        self.is_closed = True
        raise ConnectionError("lost already")


async def connected() -> Echo:
    return Echo()


async def refused() -> Echo:
    raise ConnectionRefusedError("no server")


def test_an_asyncio_client_is_called_from_any_thread_and_closed_with_its_thread():
    client = AsyncClient(connected, within_s=5)
    echo: Echo = client._client
    with ThreadPoolExecutor(4) as pool:
        values = list(pool.map(lambda n: client.call(lambda its: its.echo(n, 0.01)), "abcd"))
    assert values == [*"abcd"]

    client.close()

    assert echo.is_closed
    echo.thread.join(5)
    assert not echo.thread.is_alive()


def test_a_call_of_an_asyncio_client_times_out_and_an_error_of_connecting_ends_its_thread():
    client = AsyncClient(connected, within_s=0.05)
    with pytest.raises(TimeoutError):
        client.call(lambda its: its.echo("late", after_s=5))
    assert client.call(lambda its: its.echo("next")) == "next"
    client.close()
    before = threading.active_count()
    with pytest.raises(ConnectionRefusedError, match="no server"):
        AsyncClient(refused, within_s=5)
    for thread in threading.enumerate()[before:]:
        thread.join(5)
    assert threading.active_count() <= before


def error_in_thread(call: Callable[[], object]) -> Future[Exception | None]:
    """Call a function in a thread that does not keep the process alive if it hangs."""
    error = Future[Exception | None]()
    threading.Thread(target=lambda: error.set_result(error_of(call)), daemon=True).start()
    return error


def test_a_call_of_an_asyncio_client_ends_if_another_thread_closes_the_client():
    client, waits = AsyncClient(connected, within_s=60), threading.Event()

    async def forever() -> None:
        waits.set()
        await asyncio.Event().wait()

    error = error_in_thread(lambda: client.call(lambda _: forever()))
    assert waits.wait(5)
    client.close()
    assert isinstance(error.result(5), ConnectionError)


def test_a_call_of_a_closed_asyncio_client_times_out():
    client = AsyncClient(connected, within_s=0.05)
    client.close()
    client._client.thread.join(5)
    assert isinstance(error_in_thread(lambda: client.call(lambda its: its.echo("late"))).result(5), TimeoutError)


# Errors and metadata


def test_an_error_names_the_source_without_its_secrets():
    error = Listed(name="listed").error("refused hunter2-secret at amqp://u:p@h. Correct password.")
    assert str(error) == "source 'listed': refused *** at amqp://***@h. Correct password."
    assert type(error) is SourceError
    assert type(Listed(name="listed").error("gone", away=True)) is SourceAwayError


@pytest.mark.parametrize(
    ("error", "kind"), [(ConnectionRefusedError("hunter2-secret"), SourceError), (OSError("gone"), SourceAwayError)]
)
def test_errors_of_a_client_library_are_explained_and_an_unavailable_server_closes_the_client(error, kind):
    source = Listed(name="listed")
    client = source._client
    with (
        pytest.raises(SourceError) as raised,
        source.explaining("Start it.", refused=(ConnectionError,), away=(OSError,)),
    ):
        raise error
    shown = f"{type(error).__name__}: {'***' if kind is SourceError else 'gone'}"
    assert (str(raised.value), type(raised.value)) == (f"source 'listed': queue q: {shown}. Start it.", kind)
    assert client.is_closed is (kind is SourceAwayError)
    with pytest.raises(ZeroDivisionError), source.explaining("Start it.", away=(OSError,)):
        raise ZeroDivisionError


def test_payloads_are_paired_with_metadata():
    assert [*with_metadata([b"a", b"b"], None)] == [(b"a", {}), (b"b", {})]
    assert [*with_metadata(iter([b"a", b"b"]), iter([None, {"n": 1}]))] == [(b"a", {}), (b"b", {"n": 1})]


@pytest.mark.parametrize(
    ("payloads", "metadata", "error"),
    [
        (["a"], None, "a payload must be bytes, got str. Encode it."),
        ([b"a", b"b"], [{}], "metadata has fewer entries than payloads"),
        ([b"a"], [{}, {}], "metadata has more entries than payloads"),
    ],
)
def test_invalid_payloads_and_metadata_are_refused(payloads, metadata, error):
    with pytest.raises((TypeError, ValueError), match=error):
        list(with_metadata(payloads, metadata))


def test_deliveries_are_acknowledged_by_their_id_and_bytes_in_metadata_become_text():
    rows = Listed(name="listed").deliveries(
        message_id=["1", "2"],
        data=[b"a", b"b"],
        ack_ref="q",
        metadata=[{"text": "ü".encode(), "binary": b"\xff"}, None],
    )
    assert rows.column("ack_id").to_pylist() == ["1", "2"]
    first, second = rows.column("metadata").to_pylist()
    assert (json.loads(first), second) == ({"text": "ü", "binary": {"base64": "/w=="}}, None)


# Defaults of leased sources


def test_recorded_messages_are_renewed_and_released_by_default():
    source = Listed(name="listed")
    assert source.extend("r", held)
    source.abandon("r", held)
    refs = [("q", ["1", "2"]), ("q", ["3"])]
    assert source.calls == [*(("renew", *ref) for ref in refs), *(("release", *ref) for ref in refs)]


def test_messages_that_the_server_lists_are_renewed_and_released_recorded_or_not():
    source = Lists(name="listed", at_server=("3", "4"))
    assert source.extend("r", list), "messages that were not recorded yet"
    source.abandon("r", held)
    assert source.calls == [("renew", "r", ["3", "4"]), ("release", "r", ["3", "4"])]


@pytest.mark.parametrize(
    ("source", "recorded", "has_any"),
    [
        (Listed(name="listed"), list, True),
        (Listed(name="listed", taken=("1", "2")), held, True),
        (Listed(name="listed", taken=("1", "2", "3")), held, False),
        (Lists(name="listed"), list, True),
        (Lists(name="listed"), held, False),
    ],
    ids=["nothing recorded", "a message left", "all taken", "nothing listed or recorded", "nothing listed"],
)
def test_a_receive_is_lost_once_other_receives_have_leased_all_its_messages(source, recorded, has_any):
    assert source.extend("r", recorded) is has_any


def test_a_source_that_neither_renews_nor_extends_is_an_error():
    class Forgetful(Listed):
        renew = LeasedSource.renew

    with pytest.raises(NotImplementedError, match=r"Forgetful must implement renew\(\) or extend\(\)"):
        Forgetful(name="forgetful").extend("r", held)
