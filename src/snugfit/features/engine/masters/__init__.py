"""Master weights: a bfloat16 weight and 16 further bits, which together are the full 32-bit number."""
