"""The feature `loops`: training in loops of the user, a Trainer of transformers or a hand-written loop."""
