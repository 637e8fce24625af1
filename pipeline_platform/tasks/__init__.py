"""What Spark tasks run."""
