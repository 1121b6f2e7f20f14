"""The function `snugfit.fit`: training in the user's `transformers.Trainer`."""
