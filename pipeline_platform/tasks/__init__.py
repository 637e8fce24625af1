"""The code that runs in Spark tasks, by stage."""
