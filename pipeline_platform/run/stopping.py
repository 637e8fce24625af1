"""Termination of a run: like a drained run, it starts no more messages, and acknowledges the handled messages."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of

_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_FINISH_S = 10.0
"""Seconds in addition to twice the pipeline's `shutdown`: tasks check every 5 s whether to stop, then publish."""

_ASKED: dict[str, threading.Timer] = {}
"""Timers that interrupt runs that were asked to end, by receive. A signal is for the process, and the next step of the
run must know of it."""

_TO_END: list[str] = []
"""Receives that were acknowledged after their run was asked to end, in words. Dagster passes no value from a step to
its hook."""


@contextmanager
def heeding(flow: Flow, receive: Receive) -> Iterator[None]:
    """Stop a receive gracefully at the first signal during a step, if it can release unstarted messages.

    Messages start for another `shutdown`. A second signal interrupts the step. So does a timeout of twice `shutdown`
    and ten seconds: a callback that hangs must not keep its run alive.
    """
    is_main = threading.current_thread() is threading.main_thread()  # only there may handlers be set
    if not is_main or not intake_of(flow, receive).gives_back:
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def asked(number: int, frame: FrameType | None) -> None:
        if receive.receive_id in _ASKED:
            _call(before[signal.Signals(number)], number, frame)
            return
        last = threading.Timer(longest_s(flow.pipeline.shutdown), os.kill, (os.getpid(), number))
        last.daemon = True
        _ASKED[receive.receive_id] = last
        last.start()
        # In another thread: the signal may have interrupted a call of the store in this thread.
        threading.Thread(target=_stop, args=(flow, receive), daemon=True).start()

    for number in _SIGNALS:
        signal.signal(number, asked)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def longest_s(shutdown: timedelta) -> float:
    """Return the seconds after which a run that was asked to end is interrupted."""
    return _FINISH_S + 2 * shutdown.total_seconds()


def acknowledged(receive: Receive) -> None:
    """Store that a receive is acknowledged, so that its run can end if it was asked to."""
    if last := _ASKED.pop(receive.receive_id, None):
        last.cancel()
        _TO_END.append(f"receive {receive.receive_id}")


def end_after_step() -> None:
    """Store that this run, whose receives are acknowledged, is to end after its step although it got no signal."""
    _TO_END.append("its last receive")


def is_to_end() -> bool:
    """Whether this run was asked to end before its last receive was acknowledged."""
    return bool(_TO_END)


def end_if_asked(log: Callable[[str], None]) -> None:
    """End this run by a signal if it was asked to end before its receive was acknowledged."""
    if _TO_END:
        log(
            f"Stopped as requested: {', '.join(_TO_END)} is published and acknowledged. Unstarted messages are "
            "released to the source."
        )
        _TO_END.clear()
        signal.raise_signal(signal.SIGINT)


def _stop(flow: Flow, receive: Receive) -> None:
    shutdown = flow.pipeline.shutdown
    seconds = f"{shutdown.total_seconds():g} s"
    _LOG.warning(
        "Stopping: receive %s starts no messages after %s, and releases unstarted messages", receive.receive_id, seconds
    )
    try:
        flow.control.stop(receive.receive_id, shutdown)
    except ControlStoreError:
        _LOG.exception(
            "Could not stop receive %s: its run ends when all messages are handled, or is interrupted",
            receive.receive_id,
        )


def _call(handler: object, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
