"""Sinks: stores beside the lake that get the published rows of a batcher, each row once."""
