"""Checkpoints: their content, and the folder that stores them and always has a whole one."""
