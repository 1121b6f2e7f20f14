"""Batches without padding: how they become one row, and attention within each sequence of it."""
