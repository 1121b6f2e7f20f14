"""The memory in which activations wait for the backward pass."""
