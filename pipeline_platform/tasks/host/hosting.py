"""The host of a task: the process that calls its callbacks, and writes its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.stored_file import is_whole
from pipeline_platform.tasks.host.fork import Death, Limit, Written, in_a_fork
from pipeline_platform.tasks.host.progress import Progress, Watch

Work = Callable[[Watch | None, Death | None], Iterator[pa.RecordBatch]]
"""Does the part of a task and yields its manifest: see `Isolation` for its arguments."""


def in_a_host(work: Work, lake: Lake, pipeline: str, limit: Limit | None) -> Iterator[pa.RecordBatch]:
    """Have a host do the part of a task. Where it dies, do it here, and have forks call the callbacks.

    Yields:
        The manifest.

    Raises:
        RuntimeError: The host could not read or write, or raised before any callback.
    """
    from pipeline_platform.control.store import ControlStoreError  # late: the testing kit needs no database

    def host(progress: Progress) -> Written:
        written = Written()
        for rows in work(progress, None):
            written.write("", "", rows)
        return written

    answer = in_a_fork(host, limit=limit, outside=(OSError, ControlStoreError))
    if isinstance(answer, Written):
        rows = [batch for *_, batch in answer.batches]
        files = Manifest.of(pa.Table.from_batches(rows)).files if rows else []
        if all(is_whole(lake, f"{pipeline}/{file.table}/{file.path}", file) for file in files):
            yield from rows
            return
        answer = Death("files that are not as it named them", "", ())
    yield from work(None, answer)
