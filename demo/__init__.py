"""`make demo`: a year of departures through a queue, Dagster and Spark; its figures must add up in the end."""
