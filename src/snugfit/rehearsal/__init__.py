"""The simulation of a training step: it runs on tensors that have shapes and no data, and yields a trace."""
