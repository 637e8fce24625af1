"""Assets of this deployment: partitioned assets of its pipelines, and assets downstream of them."""
