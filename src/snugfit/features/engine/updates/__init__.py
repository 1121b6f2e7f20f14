"""Updates of weights one by one within the backward pass."""
