"""Ways to spread a model over several GPUs, as the search of plans compares them."""
