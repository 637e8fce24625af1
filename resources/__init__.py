"""What runs reach outside with: one file per connector, Spark, the lake, the acknowledger."""
