"""The slot `head`: the computation of a loss from a language model's logits."""
