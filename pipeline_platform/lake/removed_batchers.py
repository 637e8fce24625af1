"""Tables of batchers that their pipeline has no more: their rows are kept as long, and replaced by replays."""

from pipeline_platform.lake.tables import RETENTION, Table, Tables


def removed_batchers(tables: Tables) -> list[str]:
    """Return the names of tables in a pipeline's folder that runs of an earlier version of its class made."""
    names = set(tables.lake.names(tables.pipeline.name)) - set(tables.names)
    return sorted(name for name in names if not name.startswith("_") and _is_of_runs(tables, name))


def _is_of_runs(tables: Tables, name: str) -> bool:
    """Whether runs made a table; an asset downstream may have its table in the same folder."""
    table = Table(tables.lake, tables.pipeline.name, name, tables["messages"].schema)
    if not table.exists():
        return False
    with table.look() as handle:
        return RETENTION in handle.metadata().configuration
