"""Conformance suite for sinks."""
