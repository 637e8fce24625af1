"""The control store, and how much a run may take on."""
