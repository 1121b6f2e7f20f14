"""Whose kernels a model's layers run."""
