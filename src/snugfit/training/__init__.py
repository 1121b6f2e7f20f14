"""The training loop: a recipe is trained on a dataset, with checkpoints, resuming and recovery from lack of
memory.
"""
