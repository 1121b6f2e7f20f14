"""Techniques of the slot `pipeline_parallel` (a choice of the recipe): all layers on each GPU, or consecutive
ones on several.
"""
