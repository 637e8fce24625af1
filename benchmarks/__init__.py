"""Figures, and ratios where there is a peer: see README.md."""
