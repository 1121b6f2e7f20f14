"""Checkpoints: their content, and the folder that stores them and always contains a complete one."""
