"""The slot `loading`: preparing batches and copying them to the device."""
