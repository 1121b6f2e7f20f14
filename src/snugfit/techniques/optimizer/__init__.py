"""Techniques of the slot `optimizer` (a choice of the recipe): the computation of updates from gradients, and
its states.
"""
