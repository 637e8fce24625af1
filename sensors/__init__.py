"""Sensors of this deployment, which request runs according to demand and rate limits."""
