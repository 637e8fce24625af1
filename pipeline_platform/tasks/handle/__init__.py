"""Handling messages in tasks."""
