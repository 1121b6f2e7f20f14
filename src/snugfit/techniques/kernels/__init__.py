"""Techniques of the slot `kernels` (a choice of the recipe): the kernels of a model's layers, torch's or
another library's.
"""
