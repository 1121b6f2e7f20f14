"""The function `snugfit.fit`: training in a live `transformers.Trainer`."""
