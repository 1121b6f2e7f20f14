"""Plans for several GPUs: a search over ways to distribute the model, and its reports."""
