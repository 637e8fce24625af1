"""Servers of queues and logs that tests and the demo start on this machine, each for as long as a block lasts."""
