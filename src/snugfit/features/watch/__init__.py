"""The feature `watch`: measurements of a block of the user's own code, in the user's own process."""
