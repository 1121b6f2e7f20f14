"""Which weights train: all of them, or small ones added beside the frozen model."""
