"""Steps of a run, without Dagster."""
