"""Fused kernels in the place of a model's own code: Liger's, and snugfit's."""
