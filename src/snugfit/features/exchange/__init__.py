"""Configurations of other libraries: read, checked, and written for a recipe."""
