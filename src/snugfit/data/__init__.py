"""From files and datasets to samples and batches."""
