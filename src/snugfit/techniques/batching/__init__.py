"""Techniques of the slot `batching` (a choice of the recipe): the division of the global batch into
micro-batches.
"""
