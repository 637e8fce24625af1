"""Options of a Kinesis source: validation, and errors without a server."""

import pytest
from pydantic import ValidationError

from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.source.contract import SourceAwayError, SourceError

ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/clicks"


def source(**options: object) -> KinesisSource:
    return KinesisSource(**{"name": "clicks", "stream": "clicks", **options})


@pytest.mark.parametrize(
    ("stream", "region_name", "region"),
    [
        ("clicks", None, None),
        ("clicks", "us-east-2", "us-east-2"),
        (ARN, None, "eu-west-1"),
        (ARN, "us-east-2", "us-east-2"),
        (ARN.replace("arn:aws:", "arn:aws-us-gov:"), None, "eu-west-1"),
    ],
)
def test_a_stream_has_a_name_and_perhaps_a_region(stream, region_name, region):
    found = source(stream=stream, region_name=region_name)
    assert (found.stream_name, found.region) == ("clicks", region)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("stream", ["", "a/b", "a:b", "x" * 129, "arn:aws:sqs:eu-west-1:123456789012:clicks", f"{ARN}/more"]),
        ("start", ["", "latest", "AT_TIMESTAMP", "AT_TIMESTAMP:2026-01-31", "timestamp:2026-01-31T00:00:00Z"]),
        ("endpoint_url", ["localhost:4566", "ftp://host", "http://user:s3cret@host", "http://host?key=s3cret"]),
        ("on_failure", ["nack", "reject"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_option(option, values):
    for value in values:
        with pytest.raises(ValidationError, match=option) as refused:
            source(**{option: value})
        assert "s3cret" not in str(refused.value)


def test_a_time_of_start_has_a_time_zone():
    assert source(start="AT_TIMESTAMP:2026-01-31T00:00:00Z").start_time == 1_769_817_600
    assert source(start="LATEST").start_time is None


def test_a_missing_region_and_an_absent_server_are_named(monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(SourceError, match="source 'clicks': region_name is unset, and stream 'clicks' contains no"):
        source().send([b"x"])
    with pytest.raises(SourceAwayError, match=r"endpoint_url \(http://127.0.0.1:1\) does not answer"):
        source(region_name="eu-west-1", endpoint_url="http://127.0.0.1:1").send([b"x"])
