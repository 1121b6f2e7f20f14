"""The techniques for several GPUs, with their settings, and the jobs and recipes that they do not support."""
