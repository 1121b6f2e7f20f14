"""Checkpoints: their content, and the folder that always has a whole one."""
