"""Plans for several GPUs that train one model together: how many, and with which recipe."""
