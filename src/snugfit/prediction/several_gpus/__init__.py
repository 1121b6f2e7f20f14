"""Exchanges between GPUs: their bytes, their seconds, and the share that runs in parallel to the computation."""
