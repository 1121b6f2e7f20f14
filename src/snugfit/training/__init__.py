"""The loops: a recipe over a dataset, its checkpoints, and what happens to them."""
