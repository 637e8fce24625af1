"""Imports that take long, done so that a request to end the run is not lost meanwhile."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor


def import_apart(*modules: str) -> None:
    """Import modules in a thread, and wait for it.

    The handler of a signal runs in the main thread. If that is in a callback of a weak reference, of which an import
    has many, Python drops what the handler raises, and the run would not end. A wait can be interrupted.

    Args:
        modules: Names. Modules that are loaded are skipped.

    Raises:
        ImportError: A module cannot be found; or what it raises itself.
    """
    if missing := [module for module in modules if module not in sys.modules]:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="import") as thread:
            list(thread.map(importlib.import_module, missing))
