"""The division of the global batch into passes through the model."""
