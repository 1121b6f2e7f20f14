"""DeepSpeed's and torch's distributed code on tensors that have shapes and no data."""
