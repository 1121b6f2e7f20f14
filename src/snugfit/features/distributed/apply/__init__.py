"""Code that applies the fields `parallel` and `sharding` to a model: DDP, FSDP2, pipeline stages, and split
matrices and sequences.
"""
