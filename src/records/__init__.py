"""`run.json` and the step file of a run are written and read here alone. Nothing here imports torch."""
