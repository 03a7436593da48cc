"""What a trained network is used for: loaded, asked for predictions, exported, and timed."""
