"""Imitate CUDA for tensors on `meta`: the choice of kernels, and the memory that they allocate."""
