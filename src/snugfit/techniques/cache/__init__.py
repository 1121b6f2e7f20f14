"""Techniques of the slot `cache` (a choice of the recipe): the cache of keys and values in text
generation.
"""
