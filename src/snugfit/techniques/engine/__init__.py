"""Techniques of the slot `engine` (a choice of the recipe): the execution of the model's layers, uncompiled
or compiled.
"""
