"""Bytes and seconds of recipes: lower bounds, exact values from simulated steps, and the worker processes
that compute them.
"""
