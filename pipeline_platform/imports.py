"""Slow imports that do not lose a request to end the run."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor


def import_apart(*modules: str) -> None:
    """Import modules in a thread, and wait for it.

    Signal handlers run in the main thread. During an import it often executes callbacks of weak references, in which
    Python drops exceptions of a handler, and the run would not end. Waiting for a thread can be interrupted.

    Args:
        modules: Names of modules. Loaded modules are skipped.

    Raises:
        ImportError: A module cannot be found.
        Exception: A module raised it.
    """
    if missing := [module for module in modules if module not in sys.modules]:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="import") as thread:
            list(thread.map(importlib.import_module, missing))
