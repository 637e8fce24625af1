"""`make demo`: a year of departures through a queue, Dagster and Spark, with figures that must add up at its end."""
