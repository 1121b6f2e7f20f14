"""The number formats of weights and products."""
