"""Master weights: a bfloat16 weight and 16 more bits together are the full 32-bit number."""
