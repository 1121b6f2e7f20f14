"""Costs of recipes: lower bounds, simulated traces of passes and updates, seconds of the kernel queue, and
worker processes.
"""
