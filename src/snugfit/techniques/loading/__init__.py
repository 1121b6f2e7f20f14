"""Techniques of the slot `loading` (a choice of the recipe): the preparation of batches and their copies to
the device.
"""
