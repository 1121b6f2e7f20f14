"""The feature `compile`: models or layers compiled by `torch.compile`, and a simulation of compiled training
steps.
"""
