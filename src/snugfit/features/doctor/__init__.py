"""The feature `doctor`: the command `snugfit doctor`, which examines packages, extras, driver and GPUs of a
machine.
"""
