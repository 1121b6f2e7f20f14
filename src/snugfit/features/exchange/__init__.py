"""The feature `exchange`: configurations of other libraries are read, checked, and written for a recipe."""
