"""The history of a run: its events, and what they say together."""
