"""The time and place of weight updates: one by one within the backward pass, or on the host."""
