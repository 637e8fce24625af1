"""Imports during which a run is told to end."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline_platform.imports import import_apart

DEAF = """
import time
import weakref

class Thing:
    pass

def when_gone(reference):
    time.sleep(1.0)  # what a signal's handler raises now is dropped

thing = Thing()
reference = weakref.ref(thing, when_gone)
del thing
"""


class EndedError(BaseException):
    """What a signal's handler raises here, as Dagster's does."""


@pytest.fixture
def deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that, for the second that its import takes, is within the callback of a weak reference."""
    (tmp_path / "a_deaf_module.py").write_text(DEAF)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_deaf_module"
    sys.modules.pop("a_deaf_module", None)


@pytest.fixture
def told_to_end() -> Iterator[None]:
    """A signal comes after 0.3 s."""

    def end(*_: Any) -> None:
        raise EndedError

    before = signal.signal(signal.SIGUSR1, end)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    yield
    timer.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("told_to_end")
def test_a_request_to_end_is_not_lost_in_an_import(deaf: str) -> None:
    with pytest.raises(EndedError):
        import_apart(deaf)
    assert deaf in sys.modules, "what was begun is loaded, not torn"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("told_to_end")
def test_in_a_plain_import_it_is(deaf: str) -> None:
    __import__(deaf)  # the day that Python hands it on, this module is of no use any more


def test_what_an_import_raises_is_raised() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_apart("json", "no_such_module")
