"""Record a step on `meta`: a dispatch mode (`TorchDispatchMode`) writes each allocation, free and kernel to a
trace."""
