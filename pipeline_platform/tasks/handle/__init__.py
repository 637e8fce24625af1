"""Handling, in tasks."""
