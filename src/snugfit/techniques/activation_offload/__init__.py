"""Techniques of the slot `activation_offload` (a choice of the recipe): the memory that holds activations
until the backward pass.
"""
