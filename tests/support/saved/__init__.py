"""Runs that are interrupted and go on: in threads, and with checkpoints of a few numbers."""
