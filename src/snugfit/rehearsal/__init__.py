"""Simulate a training step on tensors that have shapes and no data (the `meta` device), and return its
trace."""
