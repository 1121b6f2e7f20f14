"""When weights are updated, and where: one by one within the backward pass, or on the host."""
