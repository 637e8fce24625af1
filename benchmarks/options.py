"""Options of a benchmark's command line, and ratios of its peers as text."""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any


def options(about: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the options of the command line: numbers by default, switches for False, and lists of numbers."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"type": type(default), "default": default}
        if default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, list):
            kind = {"type": type(default[0]), "nargs": "+", "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    return parser.parse_args()


def spread(ratios: Sequence[float]) -> str:
    """Return the median of ratios, with minimum and maximum."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
