"""The feature `distributed`: training of one model on several GPUs, with one process for each GPU."""
