"""Columns of models: the fields of a model, the column of each type, and data between handling and batching."""
