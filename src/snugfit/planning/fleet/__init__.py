"""Plans for many GPU models at once, and the price of a training run on each."""
