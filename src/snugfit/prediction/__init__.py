"""Predictions of a training step: its bytes and seconds, computed from a recorded trace."""
