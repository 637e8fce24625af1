"""Benchmarks, most of them as a ratio to a peer; see README.md."""
