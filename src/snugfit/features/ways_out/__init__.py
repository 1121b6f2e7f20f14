"""Changes of a recipe with which a step fits, after the answer that it does not."""
