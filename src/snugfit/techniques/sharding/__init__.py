"""Techniques of the slot `sharding` (a choice of the recipe): training states on the GPU alone, or by
DeepSpeed on the host or other GPUs.
"""
