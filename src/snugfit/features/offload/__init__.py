"""Activations offloaded to the host's memory."""
