"""The control store, and the rules for the size of a run."""
