"""Techniques of the slot `precision` (a choice of the recipe): the dtypes of weights and matrix products."""
