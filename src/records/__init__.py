"""Writes and reads `run.json` of a run and the files beside it. Nothing here imports torch."""
