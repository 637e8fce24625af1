"""Batching, in tasks."""
