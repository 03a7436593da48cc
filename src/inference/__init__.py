"""Use a trained network: load it, predict with it, export it, and measure its latency."""
