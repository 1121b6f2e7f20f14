"""One experiment: its request, the processes that run it, and what becomes of their results."""
