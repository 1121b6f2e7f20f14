"""The slot "head": logits, and the loss that is taken of them."""
