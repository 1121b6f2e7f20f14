"""Triton programs, a file for each operation, imported when the first of its kernels is launched."""
