"""Simulation of `torch.compile`: programs are lowered for a GPU that is not here, and run on shapes."""
