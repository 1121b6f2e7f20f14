"""Reading of training scripts and notebooks from their syntax trees, without running them."""
