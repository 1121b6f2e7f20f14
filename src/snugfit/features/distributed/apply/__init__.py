"""Code that applies the fields `parallel` and `sharding` to a model: DDP, FSDP2, stages, cut matrices and
sequences."""
