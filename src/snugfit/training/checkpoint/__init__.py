"""Checkpoints: what they hold, and a folder in which a whole one stands at every instant."""
