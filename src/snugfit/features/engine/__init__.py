"""The feature `engine`: training steps replayed as CUDA graphs, and gradients freed within the
backward pass.
"""
