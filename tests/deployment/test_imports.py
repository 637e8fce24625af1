"""Termination of a run during an import."""

import signal
import sys
from typing import Any

import pytest

from pipeline_platform.imports import import_apart

DEAF = """
import os
import signal
import time
import weakref

class Thing:
    pass

def when_gone(reference):
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.2)  # the handler runs by now, and in the main thread: what it raises in here is dropped

thing = Thing()
reference = weakref.ref(thing, when_gone)
del thing
"""


class EndedError(BaseException):
    """Exception of a signal handler, like Dagster's."""


@pytest.fixture
def deaf(tmp_path, monkeypatch):
    """Return a module that terminates the run during its import, in the callback of a weak reference."""
    (tmp_path / "a_deaf_module.py").write_text(DEAF)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_deaf_module"
    sys.modules.pop("a_deaf_module", None)


@pytest.fixture(autouse=True)
def ends_when_told():
    """Set a signal handler that raises, as in a run that is asked to end."""

    def end(*_: Any) -> None:
        raise EndedError

    before = signal.signal(signal.SIGUSR1, end)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_request_to_end_is_not_lost_in_an_import(deaf):
    with pytest.raises(EndedError):
        import_apart(deaf)
    assert deaf in sys.modules, "what was begun is loaded, not torn"


def test_an_exception_of_an_import_is_raised():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_apart("json", "no_such_module")
