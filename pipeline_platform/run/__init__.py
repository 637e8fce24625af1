"""A run's steps, in order."""
