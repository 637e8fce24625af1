"""Commands that set up a deployment: a new pipeline, a warm Spark server, the tables of a table queue."""
