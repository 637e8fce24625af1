"""The contract of sinks. A sink never decides anything: it stores the rows of decided receives, each receive once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from pipeline_platform.source.pauses import Patience


class SinkError(Exception):
    """A sink cannot be used. The message names the sink, the reason and the fix."""


class SinkAwayError(SinkError):
    """A sink is unavailable. The run waits for it, and if its patience ends, a later run publishes the rows."""


@dataclass(frozen=True)
class Publication:
    """Rows of a decided receive for one table.

    Attributes:
        receive_id: Receive of the rows. A sink stores the rows of a receive once per table.
        pipeline: Name of the pipeline.
        table: Name of the batcher.
        columns: Columns of the rows: columns of the data, then columns of the platform.
        started_at: Start of the receive, before which it was not published.
        windows: Windows of the receive.
        replaces: Receives whose rows in these windows a replay replaces.
        rows: Reads the rows again at each call. They need not fit into memory.
    """

    receive_id: str
    pipeline: str
    table: str
    columns: pa.Schema
    started_at: datetime
    windows: tuple[str, ...]
    replaces: tuple[str, ...]
    rows: Callable[[], Iterator[pa.RecordBatch]]


class Sink(BaseModel, ABC):
    """A store that gets the published rows of batchers.

    Several processes may publish the same receive at the same time, and again after a crash or a lost answer.
    `pipeline_platform.testing.check_sink` tests the promises of a sink.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    name: str = Field(min_length=1, description="Name of the sink in errors and logs.")

    @property
    def patience(self) -> Patience:
        """Return how long a run waits for the sink."""
        return Patience()

    @abstractmethod
    def ensure(self, pipeline: str, table: str, columns: pa.Schema) -> None:
        """Create a table, or add its new columns. A run calls it before it leases messages.

        Raises:
            SinkAwayError: The sink is unavailable.
            SinkError: The sink cannot store a column, or a column has another type.
        """

    @abstractmethod
    def publish(self, publication: Publication) -> bool:
        """Store the rows of a receive, and remove the rows that it replaces, in one step. Safe to repeat.

        Returns:
            Whether this call stored them.

        Raises:
            SinkAwayError: The sink is unavailable.
            SinkError: The sink refuses the rows.
        """

    @abstractmethod
    def is_published(self, pipeline: str, table: str, receive_id: str) -> bool:
        """Whether the rows of a receive are stored in a table.

        Raises:
            SinkAwayError: The sink is unavailable.
        """

    def erase(self, pipeline: str, table: str, messages: Mapping[str, Sequence[str]]) -> int | None:
        """Delete the rows of messages. Safe to repeat.

        Args:
            pipeline: Name of the pipeline.
            table: Name of the batcher, whose table may not exist.
            messages: Ids by source.

        Returns:
            Number of deleted rows; None if the sink does not support it, as by default.

        Raises:
            SinkAwayError: The sink is unavailable.
            SinkError: The sink refuses to delete the rows.
        """
        return None

    def close(self) -> None:
        """Close the connections of this process. The next use opens them again."""
