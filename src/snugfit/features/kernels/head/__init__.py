"""The head of a model: logits in chunks, and the loss that is computed from them."""
