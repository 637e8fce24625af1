"""Work of a step: in Spark, in the local worker, or in the process of the run."""
