"""Predicted and measured results of a training step, as plain values for all rooms above."""
