"""Compilation by torch.compile, and its simulation."""
