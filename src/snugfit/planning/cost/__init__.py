"""Costs of recipes: lower bounds, traces of parts of a step, queue times, and worker processes."""
