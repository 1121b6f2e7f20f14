"""Techniques of the slot `gradients` (a choice of the recipe): the lifetime of the weights' gradients."""
