"""The slot `allocator`: the growth of torch's CUDA allocator."""
