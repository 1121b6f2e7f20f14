"""CUDA's decisions, made for tensors on `meta`: which kernels run and what memory they take."""
