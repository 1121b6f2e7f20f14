"""Batches without padding: concatenation of sequences to one row, and attention within each of them."""
