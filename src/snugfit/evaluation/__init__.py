"""How good predictions are: the guide's suite, drawn jobs, and verified plans."""
