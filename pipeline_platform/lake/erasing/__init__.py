"""Erasing of messages from all files and logs."""
