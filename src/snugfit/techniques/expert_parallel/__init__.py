"""Techniques of the slot `expert_parallel` (a choice of the recipe): the experts of each layer are all on one
GPU, or divided over several.
"""
