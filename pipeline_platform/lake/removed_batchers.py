"""Tables of batchers that were removed or now have `table=False`: retention and replays still apply to them."""

from pipeline_platform.lake.table_properties import RETENTION
from pipeline_platform.lake.tables import Table, Tables


def removed_batchers(tables: Tables) -> list[str]:
    """Return the names of tables in a pipeline's folder that earlier versions of its class created."""
    names = set(tables.lake.folders(tables.pipeline.name)) - set(tables.names)
    return sorted(name for name in names if not name.startswith("_") and _is_of_runs(tables, name))


def _is_of_runs(tables: Tables, name: str) -> bool:
    """Whether runs created a table; downstream assets may have tables in the same folder."""
    table = Table(tables.lake, tables.pipeline.name, name, tables["messages"].schema)
    if not table.exists():
        return False
    with table.look() as handle:
        return RETENTION in handle.metadata().configuration
