"""Where callbacks are called: in a host of their task, which dies in its place."""
