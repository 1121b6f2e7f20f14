"""The slot `checkpointing`: the activations that are kept for the backward pass, and those computed again."""
