"""Optimizers beside torch's AdamW and SGD."""
