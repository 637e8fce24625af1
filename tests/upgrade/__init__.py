"""State of an earlier release, opened by this release."""
