"""Training of one model on several GPUs, one process for each."""
