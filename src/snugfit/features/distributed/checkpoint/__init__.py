"""Checkpoints of a model that is distributed over several processes."""
