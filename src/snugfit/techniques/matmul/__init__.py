"""How products of 32-bit matrices use the tensor cores."""
