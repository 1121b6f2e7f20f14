"""The feature `optimizers`: optimizers in addition to torch's AdamW and SGD."""
