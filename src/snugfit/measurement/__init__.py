"""Experiments in fresh processes, their peaks and seconds, and the ledger that keeps them."""
