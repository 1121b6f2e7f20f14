"""The activations that are kept for the backward pass, and those that are computed again."""
