"""Techniques of the slot `checkpointing` (a choice of the recipe): the activations that are kept for the
backward pass, and those recomputed.
"""
