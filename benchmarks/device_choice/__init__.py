"""The parts of `benchmarks/choose.py`: read measurements, fit coefficients, compare predictions with measurements."""
