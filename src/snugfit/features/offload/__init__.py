"""Activations that wait in the memory of the host."""
