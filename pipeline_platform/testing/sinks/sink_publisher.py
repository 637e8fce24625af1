"""Publishers in separate processes, which `check_sink` kills at a point of their work."""

import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import IO, Any, Final

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

    def publish(self, report: Callable[[str], None]) -> None:
        """Publish; report the id of this process at the point, and wait there."""
        self.sink(**self.options).publish(replace(self.publication, rows=lambda: self._rows(report)))

    def _rows(self, report: Callable[[str], None]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate((*self.batches, None)):
            if number == self.stop_before or (batch is None and self.stop_before == NEVER):
                report(str(os.getpid()))
                while self.stop_before != NEVER:
                    time.sleep(60)
            if batch is not None:
                yield batch


class Publishers:
    """Publishes in forks of a process that has imported the sink, because the import takes a second."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(  # noqa: S603 - our own
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    @contextmanager
    def publishing(self, work: Interrupted) -> Iterator[bool]:
        """Publish in another process; yield whether it has reached its point, and kill it at the end of the block."""
        _stream(self._process.stdin).write(pickle.dumps(work))
        publisher = self._line()
        try:
            yield publisher.isdigit()
        finally:
            if publisher.isdigit():
                with suppress(ProcessLookupError):
                    os.kill(int(publisher), signal.SIGKILL)
                self._line()

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, or for some seconds."""
        select.select([_stream(self._process.stdout)], [], [], seconds)

    def close(self) -> None:
        """Kill all processes, also a publisher that hangs."""
        with self._process as process, suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _line(self) -> str:
        return _stream(self._process.stdout).readline().decode().strip()


def no_rows() -> Iterator[pa.RecordBatch]:
    """Replace the rows of a publication that is pickled."""
    return iter(())


def main() -> None:
    """Publish each publication in the standard input in a process of its own, and report its end."""
    reports = os.dup(1)
    os.dup2(2, 1)  # a sink may print

    def report(word: str) -> None:
        os.write(reports, f"{word}\n".encode())

    while True:
        try:
            work: Interrupted = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own
        except EOFError:
            return
        if not (publisher := os.fork()):
            try:
                work.publish(report)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(publisher, 0)
        report("ended")


def _stream(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
