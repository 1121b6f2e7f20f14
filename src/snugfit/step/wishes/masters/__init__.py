"""Weights of bfloat16 whose masters of 32 bits are whole: the weight, and 16 bits beside it."""
