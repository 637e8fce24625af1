"""The callback process: a forked child of a task that calls user code, so that a crash does not end the task."""
