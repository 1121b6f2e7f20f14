"""The update steps of these optimizers."""
