"""The slot `batching`: the division of the global batch into micro-batches."""
