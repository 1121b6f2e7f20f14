"""CUDA's decisions for tensors on `meta`: the kernels that run and the memory that they allocate."""
