"""A run that was stopped, by whatever: what is said then, which run is gone on with, and how it goes on exactly there."""
