"""Pipelines, one file each."""
