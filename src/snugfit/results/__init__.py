"""What is predicted or measured of a step, as plain values that every room above knows."""
