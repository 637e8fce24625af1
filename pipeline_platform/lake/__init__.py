"""The lake: files and tables, receives and their decisions, and failed messages."""
