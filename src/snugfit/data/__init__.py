"""Conversion of files and datasets to samples and batches."""
