"""Training scripts and notebooks, read from their syntax trees."""
