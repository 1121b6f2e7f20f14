"""The feature `kernels`: fused kernels in place of a model's own code, those of Liger-Kernel and of
snugfit."""
