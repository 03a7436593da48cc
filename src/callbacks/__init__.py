"""What a run tells its user, one callback a file. None knows a model or a dataset: each works in any Lightning project."""
