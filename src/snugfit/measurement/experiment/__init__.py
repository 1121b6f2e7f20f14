"""One experiment: its request, its processes, and the combination of their results."""
