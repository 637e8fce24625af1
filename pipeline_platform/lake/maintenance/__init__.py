"""Maintenance of tables: retention, compaction and repair."""
