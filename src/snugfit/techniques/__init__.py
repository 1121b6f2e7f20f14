"""The techniques of a recipe: each folder is a slot and each file in it one technique, which the roster finds
by name."""
