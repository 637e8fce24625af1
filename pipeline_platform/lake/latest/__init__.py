"""Tables with the newest row of each key."""
