"""Planning for a dataset's sequence lengths: ways of padding, with their memory and speed."""
