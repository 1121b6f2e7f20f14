"""What is seen: experiments in fresh processes, their peaks, and the ledger that keeps them."""
