"""The weights that train: all of them, or small ones added to the frozen model."""
