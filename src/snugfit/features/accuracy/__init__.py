"""Predictions next to measurements: recipes of jobs, and the best recipes of a plan."""
