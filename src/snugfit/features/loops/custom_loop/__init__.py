"""`snugfit.accelerate`: a training loop that the user wrote."""
