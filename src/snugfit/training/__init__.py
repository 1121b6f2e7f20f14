"""The training loop: a recipe over a dataset, with checkpoints, resuming and recovery."""
