"""Servers for tests and demos, on loopback and free ports, ended with whoever started them."""
