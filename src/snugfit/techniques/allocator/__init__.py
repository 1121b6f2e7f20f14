"""Techniques of the slot `allocator` (a choice of the recipe): the growth of segments in torch's CUDA
allocator.
"""
