"""Acknowledging, in tasks and in the driver."""
