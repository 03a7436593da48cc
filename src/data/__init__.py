"""Datasets that serve whole batches of tensors, and the loader they share."""
