"""Batching messages in tasks."""
