"""Planning: search for the fastest recipe (combination of memory and speed techniques) that fits a GPU."""
