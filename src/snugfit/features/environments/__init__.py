"""The feature `environments`: predictions with the packages of another Python environment."""
