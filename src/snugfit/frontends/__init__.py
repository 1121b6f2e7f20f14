"""The entry points of training: snugfit's own loop, a live Trainer, and a custom loop."""
