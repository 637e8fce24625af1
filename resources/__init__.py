"""What this deployment's runs reach outside with: sources, the lake, the control store, Spark, the acknowledger."""
