"""The feature `kernels`: fused kernels by Liger-Kernel and snugfit in place of a model's own code."""
