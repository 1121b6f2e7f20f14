"""A predicted step for other tools: for PyTorch's memory viewer, and as a timeline for Perfetto."""
