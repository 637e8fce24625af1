"""Broadway's model on Dagster and Spark: pull, handle, batch, keep failures apart, acknowledge what is safe."""
