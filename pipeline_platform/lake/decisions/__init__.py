"""Receives: their records, decisions, and rows that a decision removes from files."""
