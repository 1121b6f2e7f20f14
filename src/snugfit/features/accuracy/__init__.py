"""The feature `accuracy`: predicted and measured memory and step time of training recipes."""
