"""Compare predictions with measurements of the same experiment, rank recipes, and calibrate rates."""
