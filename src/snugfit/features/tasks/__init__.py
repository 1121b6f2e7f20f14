"""The feature `tasks`: further training tasks on texts, such as question answering, with their batches and
samples.
"""
