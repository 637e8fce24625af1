"""Resources of this deployment: sources, the lake, the control store, Spark, the acknowledger."""
