"""Layers that `torch.compile` compiles, rehearsed: lowered for a GPU that is not here, and run on shapes."""
