"""The feature `accuracy`: recipes of jobs, predicted and measured, and the best recipes of a plan."""
