"""Evaluate predictions with drawn recipes and verified plans."""
