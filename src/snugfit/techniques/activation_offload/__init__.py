"""The slot `activation_offload`: the memory in which activations wait for the backward pass."""
