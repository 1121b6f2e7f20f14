"""How the global batch passes through the model."""
