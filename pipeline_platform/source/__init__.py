"""The contract of a source."""
