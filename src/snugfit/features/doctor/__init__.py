"""The feature `doctor`: the command `snugfit doctor`, which examines the packages, driver and GPUs of a
machine.
"""
