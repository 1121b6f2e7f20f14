"""Experiments in new processes, with their memory peaks and seconds, and the folder of their results
(ledger).
"""
