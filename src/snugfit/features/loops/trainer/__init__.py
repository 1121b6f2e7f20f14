"""`snugfit.fit`: a live `transformers.Trainer`."""
