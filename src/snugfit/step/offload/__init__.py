"""What waits in the host's memory: activations, and the link that they travel over."""
