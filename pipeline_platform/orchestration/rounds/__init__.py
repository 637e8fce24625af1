"""Runs of many rounds: the rounds, the reasons to end them, and their plot."""
