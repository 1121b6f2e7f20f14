"""The way of batches to the device."""
