"""Partitioned assets, jobs and checks of a pipeline."""
