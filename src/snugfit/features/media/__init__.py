"""The feature `media`: training on pictures and sounds, with synthetic batches, files, processors and
samples.
"""
