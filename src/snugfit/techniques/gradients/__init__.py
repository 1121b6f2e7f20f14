"""How long the gradients of weights exist."""
