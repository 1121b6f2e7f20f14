"""Processes that train one model together, one for each GPU."""
