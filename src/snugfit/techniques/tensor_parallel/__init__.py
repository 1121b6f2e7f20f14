"""Techniques of the slot `tensor_parallel` (a choice of the recipe): the matrices of each layer are whole on
one GPU, or sharded over several.
"""
