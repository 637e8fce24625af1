"""Servers of queues and logs that tests and the demo start on this machine, each until a block ends."""
