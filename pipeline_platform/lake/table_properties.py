"""Properties of the tables that runs create: how long a table keeps commits and transactions.

Each commit lists the log and reads the transactions of its checkpoint, so both must not grow with the age of a
pipeline. A continuous run adds a commit and a transaction to each table in each round.
"""

from collections.abc import Mapping
from datetime import timedelta

RETENTION = "delta.setTransactionRetentionDuration"
"""Property of every table that a run creates."""
LOG_RETENTION = "delta.logRetentionDuration"

KEEP_TRANSACTIONS = timedelta(hours=3)
"""Time for which a table keeps the transaction of a receive. Rows show the decision of an older receive."""
SURELY_KEPT = timedelta(hours=2)
"""Age of a receive up to which the tables have its transactions, although clocks of hosts differ."""
KEEP_LOG = timedelta(days=2)
"""Time for which a table keeps its commits: longer than any run, and than a day without its readers. Older versions
cannot be read."""

_EARLIER = {RETENTION: "interval 30 days", LOG_RETENTION: None}
"""Values of release 0.3.0, which left out the property with None."""


def properties(*, is_local: bool) -> dict[str, str]:
    """Return the properties of a new table."""
    # Reading a checkpoint takes as many requests as reading about seven commits.
    often = {} if is_local else {"delta.checkpointInterval": "10"}
    return {RETENTION: _interval(KEEP_TRANSACTIONS), LOG_RETENTION: _interval(KEEP_LOG), **often}


def outdated(current: Mapping[str, str | None]) -> dict[str, str]:
    """Return new values of the properties of a table of an earlier release. Values that an operator set stay."""
    if RETENTION not in current:  # not created by a run
        return {}
    wanted = properties(is_local=True)
    return {name: wanted[name] for name, earlier in _EARLIER.items() if current.get(name) == earlier}


def _interval(time: timedelta) -> str:
    return f"interval {time // timedelta(hours=1)} hours"
