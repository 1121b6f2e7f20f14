"""The slot `precision`: the number formats of weights and products."""
