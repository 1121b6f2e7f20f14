"""`snugfit.accelerate`: a loop that the user wrote."""
