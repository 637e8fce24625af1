"""What Spark tasks run: plain functions over Arrow batches, free of Dagster."""
