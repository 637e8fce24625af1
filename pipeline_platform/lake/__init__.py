"""The lake: one writer, manifests, the decision, tables, failed messages."""
