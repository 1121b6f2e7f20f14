"""Weights of bfloat16 with full 32-bit masters: the weight, and 16 more bits."""
