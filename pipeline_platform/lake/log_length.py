"""Length of a table's log on a local disk.

Each commit lists the log. An object store lists only files after the last checkpoint. A local disk lists all names,
which takes 3 us for each. A round per second adds 170,000 commits in the two days for which commits are kept.
"""

from pipeline_platform.lake.tables import Table

MOST_COMMITS = 10_000
"""Number of commits beyond which the oldest are removed, at any age."""
_CHECKPOINT = ".checkpoint.parquet"


def limit_log(table: Table, needed_from: int | None = None) -> int:
    """Remove the oldest commits of a long log on a local disk, up to a checkpoint; return the number of removed files.

    Args:
        table: The table.
        needed_from: Version after which commits stay, because receives in progress read them.
    """
    if not table.lake.is_local:
        return 0
    folder = table.path("_delta_log")
    versions = {name: int(name[:20]) for name in table.lake.names(folder) if name[:20].isdigit()}
    last = max(versions.values(), default=0) - MOST_COMMITS
    last = last if needed_from is None else min(last, needed_from)
    first = max(
        (version for name, version in versions.items() if name[20:] == _CHECKPOINT and version <= last), default=0
    )
    old = [name for name, version in versions.items() if version < first]
    for name in old:
        table.lake.remove_file(f"{folder}/{name}")
    return len(old)
