"""How a language model's logits become a loss."""
