"""How good predictions are: drawn jobs and verified plans."""
