"""What runs are given: the lake and the control store, sources and the acknowledger, Spark."""
