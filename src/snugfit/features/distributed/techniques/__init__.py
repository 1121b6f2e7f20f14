"""The techniques for several GPUs, with their settings and refusals."""
