"""Exchanges between GPUs: bytes, seconds, and the share in parallel to the computation."""
