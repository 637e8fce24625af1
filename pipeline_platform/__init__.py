"""Broadway's model on Dagster and Spark: pull messages, handle, batch, keep failures apart, acknowledge what is safe."""
