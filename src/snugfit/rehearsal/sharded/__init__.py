"""DeepSpeed's own code on tensors that have shapes and no data."""
