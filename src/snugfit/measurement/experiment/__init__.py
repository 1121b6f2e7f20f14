"""One experiment: its parameters, its processes, and their combined results."""
