"""The feature `offload`: it copies saved activations to the host's memory until the backward pass."""
