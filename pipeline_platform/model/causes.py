"""Causes of failures: their reasons without the values that differ from message to message."""

from collections import Counter
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

_VALUES = "|".join(
    (
        r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b",  # a UUID
        r"(?:\B[+-])?\b[0-9]\w*(?:[.,:+-][0-9]\w*)*",  # a number, time, address or version, with its unit
        r"\b[0-9A-Fa-f]{8,}\b",  # hexadecimal
        r"\b(?:[A-Za-z_]*[0-9]){3}\w*",  # a word with three digits, such as a key in base 32 or 64
    )
)
_QUOTED = r"""(?:\bb|\B)(?:'(?:[^']|'\b)*'|"(?:[^"]|"\b)*")\B"""
"""A quoted value. A quote after or before a letter is an apostrophe."""
_KEY = r"""^(?:\w*Error: )?(?:'[^']*'|"[^"]*")$"""
"""A reason that is only a quoted value, such as the missing key of a `KeyError`: without it, nothing would remain."""


def causes(reasons: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return each reason with `*` for numbers, ids and quoted values, so that failures of one cause have equal texts.

    The cause of a cause is the cause itself. PyArrow does all of it, because there may be a million reasons.
    """
    unquoted = pc.replace_substring_regex(reasons, _QUOTED, "'*'")
    some = pc.if_else(pc.match_substring_regex(reasons, _KEY), reasons, unquoted)
    return pc.replace_substring_regex(some, _VALUES, "*")


def cause_of(reason: str) -> str:
    """Return the cause of a reason."""
    return str(causes(pa.array([reason]))[0].as_py())


def by_cause(counted: Mapping[str, int]) -> Counter[str]:
    """Return counts by cause of counts by reason. The only reason of a cause is kept as it is."""
    found: dict[str, tuple[str, int]] = {}
    for (reason, count), cause in zip(counted.items(), causes(pa.array(counted, pa.string())).to_pylist(), strict=True):
        before = found.get(cause)
        found[cause] = (reason, count) if before is None else (cause, before[1] + count)
    return Counter(dict(found.values()))
