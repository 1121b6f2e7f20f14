"""Comparison of predictions with measurements, for drawn recipes and for verified plans."""
