"""The feature `lengths`: ways of padding for a dataset's sequence lengths, with their memory and speed."""
