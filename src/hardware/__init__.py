"""What this machine can do, is doing, and must do."""
