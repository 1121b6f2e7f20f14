"""Techniques of the slot `head` (a choice of the recipe): the computation of a loss from a language model's
logits.
"""
