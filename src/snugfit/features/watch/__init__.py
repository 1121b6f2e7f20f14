"""The feature `watch`: memory and time of a block of the user's own code, measured in the user's process."""
