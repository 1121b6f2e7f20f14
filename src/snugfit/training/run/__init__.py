"""One training run: its session, its steps, and the work between them."""
