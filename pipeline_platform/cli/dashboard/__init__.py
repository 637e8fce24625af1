"""`pipeline-platform dashboard`: a live picture of pipelines."""
