"""`run.json` of a run and what lies beside it are written and read here. Nothing here imports torch."""
