"""The feature `compile`: compilation by torch.compile, and its simulation."""
