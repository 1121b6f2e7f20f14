"""The training loop: it trains a model on a dataset, saves and resumes checkpoints, and recovers from lack of
memory.
"""
