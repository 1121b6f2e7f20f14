"""Predictions: the bytes and seconds that follow from a trace."""
