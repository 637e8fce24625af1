"""Spark: its server, its tasks, and the code that is shipped to its workers."""
