"""Techniques of the slot `adapters` (a choice of the recipe): the trained weights, all of the model's or
small ones added to a frozen model.
"""
