"""The techniques of a recipe. Each folder is a slot (a choice of the recipe, such as the optimizer). Each
file in it is one technique, which the roster finds by name.
"""
