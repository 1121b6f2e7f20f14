"""Techniques of the slot `sharding` (a choice of the recipe): weights, gradients and optimizer states on the
GPU alone, or by DeepSpeed on the host or other GPUs.
"""
