"""The feature `exchange`: training configurations of other libraries are read, checked, and written."""
