"""The steps of these optimizers."""
