"""One training run: its setup, its steps, and the work between steps (evaluation, checkpoints, stops)."""
