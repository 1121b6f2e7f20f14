"""Which activations are kept for the backward pass, and which are computed again."""
