"""Logits of a model's head in chunks, and the loss that is computed from them."""
