"""How torch's CUDA allocator grows."""
