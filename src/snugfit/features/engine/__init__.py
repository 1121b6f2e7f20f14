"""The feature `engine`: steps that are replayed as CUDA graphs, and gradients that are released in the
backward pass."""
