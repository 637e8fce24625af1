"""Publishers in separate processes, which `check_sink` kills at a point of their work."""

import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
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

    def publish(self) -> None:
        """Publish; report the id of this process at the point, and wait there."""
        self.sink(**self.options).publish(replace(self.publication, rows=self._rows))

    def _rows(self) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate((*self.batches, None)):
            if number == self.stop_before or (batch is None and self.stop_before == NEVER):
                _say(str(os.getpid()))
                while self.stop_before != NEVER:
                    time.sleep(60)
            if batch is not None:
                yield batch


class Publishers:
    """Publishes in processes that are forked from one that has loaded the sink, which takes a second."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(  # noqa: S603 - our own
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    @contextmanager
    def publishing(self, work: Interrupted) -> Iterator[bool]:
        """Publish in another process; yield whether it got to its point, and kill it at the end of the block."""
        _stream(self._process.stdin).write(pickle.dumps(work))
        publisher = self._line()
        try:
            yield publisher != _ENDED
        finally:
            if publisher != _ENDED:
                with suppress(ProcessLookupError):
                    os.kill(int(publisher), signal.SIGKILL)
                self._line()

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, or for some seconds."""
        select.select([_stream(self._process.stdout)], [], [], seconds)

    def close(self) -> None:
        """End all processes."""
        with self._process as process:
            _stream(process.stdin).close()

    def _line(self) -> str:
        return _stream(self._process.stdout).readline().decode().strip()


_ENDED: Final = "ended"


def no_rows() -> Iterator[pa.RecordBatch]:
    """Replace the rows of a publication that is pickled."""
    return iter(())


def main() -> None:
    """Publish each publication in the standard input in a process of its own, and report its end."""
    while True:
        try:
            work: Interrupted = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own
        except EOFError:
            return
        if not os.fork():
            try:
                work.publish()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.wait()
        _say(_ENDED)


def _say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def _stream(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
