"""The job, its model and batches, and the table of GPUs."""
