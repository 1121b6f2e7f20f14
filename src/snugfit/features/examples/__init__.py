"""The feature `examples`: the prediction of a training step that a user's own Python file runs."""
