"""The feature `serving`: memory of inference servers at their start."""
