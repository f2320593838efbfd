"""The version of this package. Workers of one swarm must have the same."""

__version__ = "0.1.0"
