"""Removal of column bounds from a table's whole log, because they are values of rows that may be erased.

Files of the platform have no bounds in the log. Other writers, such as a compaction by Spark, add them.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline_platform.lake.maintenance.compaction import drop_bounds
from pipeline_platform.lake.tables import Table

_BOUNDS = (b"minValues", b"maxValues")
_BOTH = "minValues|maxValues"


def forget_bounds(table: Table) -> int:
    """Remove bounds from the table's commits and checkpoints; return the number of changed and removed files.

    A commit is rewritten in place: only the statistics of its files change. Checkpoints with bounds are removed after a
    new checkpoint is written. Safe to repeat.
    """
    drop_bounds(table)
    log = table.path("_delta_log")
    names = table.lake.names(log)
    commits = [name for name in names if name.endswith(".json") and name[:20].isdigit()]
    checkpoints = [name for name in names if ".checkpoint." in name]
    with ThreadPoolExecutor(16) as threads:  # each call waits for requests to an object store
        changed = sum(threads.map(lambda name: _rewrite(table, f"{log}/{name}"), commits))
        old = list(threads.map(lambda name: _has_bounds(table, f"{log}/{name}"), checkpoints))
    with_bounds = [name for name, has in zip(checkpoints, old, strict=True) if has]
    if with_bounds:
        with table.look() as handle:
            handle.create_checkpoint()
            table.sync_log(handle.version())  # before the checkpoints that it replaces are removed
            newest = f"{handle.version():020d}"
        for name in with_bounds:
            if name[:20] < newest:
                table.lake.remove_file(f"{log}/{name}")
    return changed + len(with_bounds)


def _rewrite(table: Table, path: str) -> bool:
    content = table.lake.read(path)
    if content is None or not any(mark in content for mark in _BOUNDS):
        return False
    lines = []
    for line in content.splitlines():
        action = json.loads(line)
        for kind in ("add", "remove"):
            if stats := (action.get(kind) or {}).get("stats"):
                action[kind]["stats"] = json.dumps({"numRecords": json.loads(stats).get("numRecords")})
        lines.append(json.dumps(action))
    table.lake.write(path, "\n".join(lines).encode())
    return True


def _has_bounds(table: Table, path: str) -> bool:
    if not path.endswith(".parquet"):
        return True
    try:
        with table.lake.open_input(path) as opened:
            file = pq.ParquetFile(opened)
            columns = {column.name for column in file.schema_arrow.field("add").type}
            if "stats_parsed" in columns or "stats" not in columns:
                return "stats_parsed" in columns
            groups = (file.read_row_group(group, ["add.stats"])["add"] for group in range(file.num_row_groups))
            found = (pc.match_substring_regex(pc.struct_field(rows, "stats"), _BOTH) for rows in groups)
            return any(pc.any(has).as_py() for has in found)
    except FileNotFoundError:  # a commit has removed it meanwhile
        return False
