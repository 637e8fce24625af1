"""The job that compacts tables, and deletes old windows and runs."""
