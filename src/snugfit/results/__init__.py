"""Predicted and measured results of a training step, as plain dataclasses."""
