"""The slot `matmul`: the use of tensor cores in products of 32-bit matrices."""
