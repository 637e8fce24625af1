"""Options of a Kinesis source, and their validation."""

import re

from pydantic import Field, field_validator

from pipeline_platform.connectors.aws import Url
from pipeline_platform.source.options import time_of_start
from pipeline_platform.source.positioned import PositionedSource

_ARN = r"arn:aws[\w-]*:kinesis:([a-z0-9-]+):\d{12}:stream/([a-zA-Z0-9_.-]{1,128})"
_STARTS = ("TRIM_HORIZON", "LATEST"), "AT_TIMESTAMP"
_NAME = r"[a-zA-Z0-9_.-]{1,128}"


class KinesisOptions(PositionedSource):
    """Options of a Kinesis source."""

    stream: str = Field(description="Name or ARN of the stream. An ARN is needed for a stream of another account.")
    start: str = Field(
        "TRIM_HORIZON",
        description="Position from which a new source reads: TRIM_HORIZON (the oldest message), LATEST, "
        "or AT_TIMESTAMP:<ISO 8601 with a time zone>, as in AT_TIMESTAMP:2026-01-31T00:00:00Z. Shards that appear "
        "later are read from their start.",
    )
    region_name: str | None = Field(
        None, description="AWS region; by default the region of the ARN, or of the environment or profile."
    )
    endpoint_url: Url | None = Field(None, description="URL of a server other than AWS.")
    profile_name: str | None = Field(None, description="AWS profile; by default the environment's.")

    @field_validator("stream")
    @classmethod
    def _is_a_stream(cls, stream: str) -> str:
        if not re.fullmatch(f"{_NAME}|{_ARN}", stream):
            raise ValueError(
                "must be the name of a stream (letters, digits and _.-, at most 128), or its ARN, such as "
                f"arn:aws:kinesis:eu-west-1:123456789012:stream/orders, got {stream!r}. Correct it."
            )
        return stream

    @field_validator("start")
    @classmethod
    def _starts_somewhere(cls, start: str) -> str:
        time_of_start(start, *_STARTS)
        return start

    @property
    def stream_name(self) -> str:
        """Name of the stream."""
        return self.stream.rpartition("/")[2]

    @property
    def region(self) -> str | None:
        """Region of the option or of the ARN; None for the region of the environment."""
        arn = re.fullmatch(_ARN, self.stream)
        return self.region_name or (arn[1] if arn else None)

    @property
    def start_time(self) -> float | None:
        """Time of a start `AT_TIMESTAMP:...` in seconds since the epoch; None for another start."""
        return time_of_start(self.start, *_STARTS)
