"""Ways to distribute a model over several GPUs, as the search of plans compares them."""
