"""Recorded runs and stand-ins for the packages of sinks."""
