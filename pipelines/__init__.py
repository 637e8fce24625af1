"""Pipelines, a file for each."""
