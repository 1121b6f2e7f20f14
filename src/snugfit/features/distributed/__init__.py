"""Training of one model on several GPUs."""
