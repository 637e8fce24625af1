"""This deployment's assets: the partitioned ones of its pipelines, and those downstream of them."""
