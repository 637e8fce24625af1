"""Publisher in a separate process, which `check_sink` kills at a point of its work."""

import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from pipeline_platform.sinks.contract import Publication, Sink

NEVER: Final = -1
"""Does not stop before a batch."""


@dataclass(frozen=True)
class Interrupted:
    """A publication that stops before one of its batches, or after the last one."""

    sink: type[Sink]
    options: dict[str, Any]
    publication: Publication
    batches: Sequence[pa.RecordBatch]
    stop_before: int

    def publish(self) -> None:
        """Publish; report the point on the standard output, and wait there."""
        self.sink(**self.options).publish(replace(self.publication, rows=self._rows))

    def _rows(self) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate((*self.batches, None)):
            if number == self.stop_before or (batch is None and self.stop_before == NEVER):
                sys.stdout.write("there\n")
                sys.stdout.flush()
                while self.stop_before != NEVER:
                    time.sleep(60)
            if batch is not None:
                yield batch


def no_rows() -> Iterator[pa.RecordBatch]:
    """Replace the rows of a publication that is pickled."""
    return iter(())


def main() -> None:
    """Publish the publication in the standard input."""
    work: Interrupted = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own
    work.publish()
