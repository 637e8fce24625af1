"""A run that is terminated: like one that is drained, it begins no more messages, and acknowledges the rest."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.ledger import Receive
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of

_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_FINISH_S = 10.0
"""Beside the pipeline's `shutdown`, twice: tasks look each five seconds whether to stop, then all is published."""

_ASKED: dict[str, threading.Timer] = {}
"""Of each receive of this process whose run was asked to end: what ends it all the same when it takes too long."""


_TO_END: list[str] = []
"""The receives of this process that are acknowledged since its run was asked to end."""


@contextmanager
def heeding(flow: Flow, receive: Receive) -> Iterator[None]:
    """Have the first signal to end stop a receive while a step works, where it can give back what is not begun.

    Messages begin for `shutdown` more. A second signal interrupts the step, and so does the time of two `shutdown` and
    ten seconds: a callback that hangs must not keep its run alive.
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
        last = threading.Timer(longest_s(flow.pipeline.shutdown), _signal, (number,))
        last.daemon = True
        _ASKED[receive.receive_id] = last
        last.start()
        # Not here: the signal may have come while this thread is at the store.
        threading.Thread(target=_stop, args=(flow, receive), daemon=True).start()

    for number in _SIGNALS:
        signal.signal(number, asked)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def longest_s(shutdown: timedelta) -> float:
    """Seconds that a run which was asked to end may take before it is interrupted."""
    return _FINISH_S + 2 * shutdown.total_seconds()


def acknowledged(receive: Receive) -> None:
    """Note that a receive is acknowledged: a run that was asked to end may do so now."""
    if last := _ASKED.pop(receive.receive_id, None):
        last.cancel()
        _TO_END.append(receive.receive_id)


def end_if_asked(log: Callable[[str], None]) -> None:
    """End this run if it was asked to end before its receive was acknowledged; whoever handles signals does it."""
    if _TO_END:
        log(
            f"Ending as asked: receive {', '.join(_TO_END)} is published and acknowledged; messages that were not "
            "started are released to the source"
        )
        _TO_END.clear()
        signal.raise_signal(signal.SIGINT)


def _signal(number: int) -> None:
    os.kill(os.getpid(), number)


def _stop(flow: Flow, receive: Receive) -> None:
    shutdown = flow.pipeline.shutdown
    _LOG.warning(
        "asked to end: receive %s begins no message after %s, and gives back the rest", receive.receive_id, shutdown
    )
    try:
        flow.control.stop(receive.receive_id, shutdown)
    except ControlStoreError:
        _LOG.exception(
            "could not stop receive %s; its run ends when all is handled, or is interrupted", receive.receive_id
        )


def _call(handler: object, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
