"""The growth of torch's CUDA allocator."""
