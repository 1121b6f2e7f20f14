"""One experiment: its request, its processes, and their combined results."""
