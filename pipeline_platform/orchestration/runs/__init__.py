"""The receive of a Dagster run: its configuration, its start, its further receives, and runs that quote messages."""
