"""Planning: the search for the fastest recipe that fits a GPU."""
