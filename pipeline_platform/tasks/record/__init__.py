"""What became of messages, as tasks write it down."""
