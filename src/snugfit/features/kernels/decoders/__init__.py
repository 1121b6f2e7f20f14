"""Decoders of transformers in which snugfit's kernels replace modules."""
