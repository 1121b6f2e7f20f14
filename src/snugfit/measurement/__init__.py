"""Experiments in new processes, with their peaks and seconds, and the ledger of their results."""
