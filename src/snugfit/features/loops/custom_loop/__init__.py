"""The function `snugfit.accelerate`: training in a loop that the user wrote."""
