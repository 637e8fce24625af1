"""Receiving messages in tasks."""
