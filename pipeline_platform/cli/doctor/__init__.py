"""Checks of `pipeline-platform doctor`."""
