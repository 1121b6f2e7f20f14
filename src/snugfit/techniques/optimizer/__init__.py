"""How gradients become updates, and what state that takes."""
