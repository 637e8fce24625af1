"""Kinesis as a source: expired iterators and positions, throttling, and refused messages, on a fake of its API."""

import logging
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError

from pipeline_platform import Share
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.connectors.kinesis.kinesis_api import Shard
from pipeline_platform.connectors.kinesis.marks import Mark
from pipeline_platform.connectors.kinesis.shard_cursor import Look, ShardCursor
from pipeline_platform.connectors.kinesis.shard_looks import ShardLooks
from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.source.offsets import Place
from pipeline_platform.source.pauses import Patience
from tests.fixtures.kinesis import received

HOUR, DAY = 3_600.0, 86_400.0
NOW = 1_800_000_000.0
EVERY = ("0", str(2**128 - 1))


def error(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "as a test wants"}}, "GetRecords")


class FakeClient:
    """A client of one shard with the records "1" to "9", whose answers a test replaces by errors."""

    meta = SimpleNamespace(endpoint_url="a fake")

    def __init__(self, *errors: str) -> None:
        self.errors, self.asked = list(errors), list[dict]()

    def describe_stream_summary(self, **_):
        created = datetime.fromtimestamp(NOW, UTC)
        return {"StreamDescriptionSummary": {"StreamCreationTimestamp": created, "RetentionPeriodHours": 24}}

    def get_shard_iterator(self, **how):
        self.asked.append(how)
        if "StartingSequenceNumber" in how and "sequence" in self.errors:
            raise error("InvalidArgumentException")
        return {"ShardIterator": how.get("StartingSequenceNumber", "0")}

    def get_records(self, *, ShardIterator, Limit):  # noqa: N803
        self.asked.append({"from": ShardIterator})
        if self.errors and self.errors[0] != "sequence":
            raise error(self.errors.pop(0))
        first = int(ShardIterator) + 1
        records = [
            {
                "SequenceNumber": f"{n}",
                "Data": b"%d" % n,
                "PartitionKey": "k",
                "ApproximateArrivalTimestamp": datetime.now(UTC),
            }
            for n in range(first, min(first + min(Limit, 2), 10))
        ]
        further = f"{first + len(records) - 1}"
        return {"Records": records, "NextShardIterator": further, "MillisBehindLatest": 0 if len(records) < 2 else 5}

    def put_records(self, *, Records, StreamName):  # noqa: N803
        self.asked.append({"put": [entry["Data"] for entry in Records]})
        code = self.errors.pop(0) if self.errors else ""
        busy, last = {"ErrorCode": code, "ErrorMessage": "busy"}, len(Records) - 1
        return {"Records": [busy if code and (n % 2 or n == last) else {} for n in range(len(Records))]}


@pytest.fixture
def faked(monkeypatch):
    """Return a function that builds a source with a fake client."""

    def build(client: FakeClient) -> KinesisSource:
        source = KinesisSource(name="kinesis", stream="orders")
        source._api.__dict__["client"] = client
        return source

    monkeypatch.setattr(KinesisSource, "patience", Patience(least_s=0.001, most_s=0.002, within_s=0.2))
    return build


def cursor(source: KinesisSource, mark: Mark = Mark()) -> ShardCursor:  # noqa: B008
    return ShardCursor(source._api, "shardId-000000000000", EVERY, mark)


def read_all(reading: ShardCursor) -> list[bytes]:
    found, has_more = [], True
    while has_more:
        messages, has_more = reading.read(100)
        found += [message.data for message in messages]
    return found


def test_an_expired_iterator_is_renewed_after_the_last_message(faked):
    client = FakeClient()
    reading = cursor(faked(client))
    assert [message.data for message in reading.read(100)[0]] == [b"1", b"2"]
    client.errors = ["ExpiredIteratorException"]
    assert read_all(reading) == [b"%d" % n for n in range(3, 10)]
    renewed = [how for how in client.asked if "ShardIteratorType" in how]
    assert [(how["ShardIteratorType"], how.get("StartingSequenceNumber")) for how in renewed] == [
        ("TRIM_HORIZON", None),
        ("AFTER_SEQUENCE_NUMBER", "2"),
    ]


def test_a_refused_sequence_number_continues_at_the_oldest_message_after_it(faked):
    client = FakeClient("sequence")
    at = datetime.now(UTC).timestamp()
    reading = cursor(faked(client), Mark(sequence="4", arrived=at, since=at))
    assert read_all(reading) == [b"%d" % n for n in range(5, 10)]


@pytest.mark.parametrize(
    ("mark", "kind"),
    [
        (Mark(), "TRIM_HORIZON"),
        (Mark(since=NOW - HOUR), "AT_TIMESTAMP"),
        (Mark(since=NOW - 2 * DAY), "TRIM_HORIZON"),
        (Mark(sequence="7", arrived=NOW - HOUR, since=NOW - HOUR), "AFTER_SEQUENCE_NUMBER"),
        (Mark(sequence="7", sub=0, arrived=NOW - HOUR, since=NOW - HOUR), "AT_SEQUENCE_NUMBER"),
        (Mark(sequence="7", arrived=NOW - HOUR, since=NOW - HOUR / 2), "AT_TIMESTAMP"),
        (Mark(sequence="7", arrived=NOW - 2 * DAY, since=NOW - HOUR), "AT_TIMESTAMP"),
        (Mark(sequence="7", arrived=NOW - 2 * DAY, since=NOW - 2 * DAY), "TRIM_HORIZON"),
    ],
)
def test_an_iterator_starts_at_a_position_that_has_not_expired(mark, kind):
    assert mark.iterator(NOW, DAY)["ShardIteratorType"] == kind
    assert bool(mark.lost(NOW, DAY)) is (0 < mark.since < NOW - DAY)
    assert Mark.of(str(mark)) == mark


class IdleClient(FakeClient):
    """A client of a shard whose only record, "4", is 20 hours old. A page covers five minutes."""

    now = datetime.now(UTC).timestamp()
    arrived = now - 20 * HOUR

    def get_shard_iterator(self, *, Timestamp=None, **_):  # noqa: N803
        return {"ShardIterator": str(Timestamp.timestamp() if Timestamp else self.arrived)}

    def get_records(self, *, ShardIterator, **_):  # noqa: N803
        past = min(float(ShardIterator) + 300, self.now)
        return {"Records": [], "NextShardIterator": str(past), "MillisBehindLatest": round(self.now - past) * 1_000}


def test_no_message_waits_in_a_shard_that_is_idle_for_hours(faked):
    source, now = faked(IdleClient()), IdleClient.now
    name, shard = "orders:0:shard-0", Shard("shard-0", (), EVERY, is_closed=False)
    mark = Mark(sequence="4", arrived=IdleClient.arrived, since=now - HOUR)
    places = {name: Place(name, 0, 0, mark=str(mark))}

    looked = ShardLooks(source._api).look({name: shard}, places, 1, now)

    assert (looked.waiting, looked.lost) == ({}, {})
    _, renewed = looked.changed[name]
    assert renewed == mark.model_copy(update={"since": now - HOUR / 4})
    assert cursor(source, renewed).look(1) == Look(is_waiting=False)


def test_a_throttled_read_ends_after_the_messages_that_it_has(faked, caplog):
    client = FakeClient()
    source = faked(client)
    share = Share(at={"shards": [[f"orders:{NOW:.0f}:shardId-000000000000", 0, 100, "{}", *EVERY]]}, messages=100)
    reading = source.read(share, "a")
    first = next(reading)
    client.errors = ["ProvisionedThroughputExceededException"]
    rest = [*reading]
    assert (first.num_rows, rest) == (2, [])
    assert "used at its limits (ProvisionedThroughputExceededException)" in caplog.text
    client.errors = ["ProvisionedThroughputExceededException"]
    with pytest.raises(SourceAwayError, match="used at its limits"):
        next(source.read(share, "a"))


def test_refused_messages_are_sent_again_alone(faked):
    client = FakeClient("ProvisionedThroughputExceededException", "InternalFailure")
    assert faked(client).send([b"1", b"2", b"3", b"4"]) == 4
    assert client.asked == [{"put": [b"1", b"2", b"3", b"4"]}, {"put": [b"2", b"4"]}, {"put": [b"4"]}]


@pytest.mark.parametrize("codes", [["ProvisionedThroughputExceededException"] * 1_000, ["KMSAccessDeniedException"]])
def test_messages_that_stay_refused_are_an_error(faked, codes):
    with pytest.raises(SourceError, match=f"Kinesis refused 1 messages, after 1 were sent. First error: {codes[0]}"):
        faked(FakeClient(*codes)).send([b"1", b"2"])


def stop_reading(source: KinesisSource, for_s: float) -> None:
    """Change the position of the only shard as if its messages had not been read for some time."""
    (name, place), *_ = source.positions.places("kinesis").items()
    old = Mark.of(place.mark).model_copy(update={"since": datetime.now(UTC).timestamp() - for_s})
    source._shard_positions.remark({name: (place.mark, old)})


def test_a_clock_that_is_ahead_moves_no_position_past_later_messages(kinesis_source, monkeypatch):
    source, time_of = kinesis_source(), time.time
    assert source.backlog().messages == 0
    stop_reading(source, 0.6 * HOUR)
    monkeypatch.setattr(time, "time", lambda: time_of() + HOUR)

    source.backlog()

    (place,) = source.positions.places("kinesis").values()
    assert -HOUR < Mark.of(place.mark).since - datetime.now(UTC).timestamp() < 0


def test_messages_count_as_redelivered_if_the_clock_is_15_minutes_behind_at_their_release():
    assert Mark().released(NOW - 15 * 60).again_to >= NOW


def test_messages_older_than_the_retention_are_reported_once_or_while_messages_wait(kinesis_source, caplog):
    source = kinesis_source()
    source.send([b"one"])
    rows = received(source, "a")
    source.finish("a", lambda: [(rows[0]["ack_ref"], [rows[0]["ack_id"]])])

    def losses():
        return ["may have lost messages that arrived between" in source.backlog().lost for _ in range(2)]

    stop_reading(source, 25 * HOUR)
    assert losses() == [True, False]
    stop_reading(source, 25 * HOUR)
    source.send([b"two"])
    assert losses() == [True, True]
    with caplog.at_level(logging.ERROR):
        rows = received(source, "b")
    assert [row["data"] for row in rows] == [b"two"]
    assert ["may have lost" in message for message in caplog.messages] == [True]
    source.finish("b", lambda: [(row["ack_ref"], [row["ack_id"]]) for row in rows])
    assert source.backlog().lost == ""


def test_a_missing_region_and_an_absent_server_are_named(monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(SourceError, match="source 'clicks': region_name is unset, and stream 'clicks' contains no"):
        KinesisSource(name="clicks", stream="clicks").send([b"x"])
    away = KinesisSource(name="clicks", stream="c", region_name="eu-west-1", endpoint_url="http://127.0.0.1:1")
    with pytest.raises(SourceAwayError, match=r"endpoint_url \(http://127.0.0.1:1\) does not answer"):
        away.send([b"x"])
