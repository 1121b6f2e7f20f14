"""Measurements of a block of the user's own code, in the user's own process."""
