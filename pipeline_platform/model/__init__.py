"""What an author says: messages, options, pipelines, and the columns of their tables."""
