"""`make demo`: handle a year of departures with a queue, Dagster and Spark, and check the totals."""
