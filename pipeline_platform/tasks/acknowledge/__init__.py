"""Acknowledging messages, in tasks and in the driver."""
