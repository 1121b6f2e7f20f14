"""Memory of inference servers at their start."""
