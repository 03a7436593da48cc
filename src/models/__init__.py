"""Plain PyTorch networks; they know nothing of Lightning, Hydra or devices."""
