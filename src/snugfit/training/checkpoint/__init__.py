"""Checkpoints of a training run: their files, and the folder that stores them and always has a
complete one.
"""
