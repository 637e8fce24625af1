"""Receiving, in tasks."""
