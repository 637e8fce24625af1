"""Recording the outcomes of messages in tasks."""
