"""What must be trained, and on what: the job, its model, its batches, and the table of GPUs."""
