"""Dagster resources of runs: lake, control store, sources, acknowledger and Spark."""
