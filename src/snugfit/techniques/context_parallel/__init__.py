"""Techniques of the slot `context_parallel` (a choice of the recipe): sequences are whole on each GPU, or
split over several.
"""
