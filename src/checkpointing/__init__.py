"""Fault tolerance: checkpoint files, signals, random state, and resuming a run exactly."""
