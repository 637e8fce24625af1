"""Spark: how it is asked, started and shipped code."""
