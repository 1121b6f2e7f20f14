"""Planning: the fastest recipe that fits."""
