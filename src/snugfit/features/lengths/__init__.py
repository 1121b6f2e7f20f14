"""The feature `lengths`: ways of padding the batches of a dataset, with their memory and speed."""
