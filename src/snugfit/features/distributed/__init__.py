"""Training one model on several GPUs: the ways to split it, its steps and its checkpoints."""
