"""The feature `ways_out`: changes of a recipe with which a step fits, after a prediction that it does not."""
