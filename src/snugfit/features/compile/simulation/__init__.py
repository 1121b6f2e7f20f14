"""Simulation of `torch.compile`: Inductor generates programs for a GPU that is not in this machine, and they
run on tensors without data.
"""
