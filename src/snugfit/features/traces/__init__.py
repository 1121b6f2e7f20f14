"""The option `--trace` of `snugfit predict`: the predicted step as a file for other viewers."""
