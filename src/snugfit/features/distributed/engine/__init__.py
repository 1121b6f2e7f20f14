"""The field `sharding`: DeepSpeed's engine, and the loops that run it."""
