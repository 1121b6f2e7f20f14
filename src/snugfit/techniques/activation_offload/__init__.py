"""Where activations wait for the backward pass."""
