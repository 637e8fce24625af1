"""A table of a database as a queue."""

from pipeline_platform.connectors.table_queue.table_queue_source import TableQueue

__all__ = ["TableQueue"]
