"""Checkpoints of a model whose parts several processes have."""
