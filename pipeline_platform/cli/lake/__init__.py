"""Commands on data in the lake: messages, receives and files of tables."""
