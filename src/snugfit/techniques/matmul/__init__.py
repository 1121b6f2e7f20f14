"""Techniques of the slot `matmul` (a choice of the recipe): the use of tensor cores in products of 32-bit
matrices.
"""
