"""The step rehearsed: run on tensors with shapes and no data, written down as a trace."""
