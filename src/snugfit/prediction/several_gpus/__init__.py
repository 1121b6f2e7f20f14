"""What exchanges between GPUs take: bytes, seconds, and what of it runs beside the computation."""
