"""The feature `offload`: activations are offloaded to the host's memory."""
