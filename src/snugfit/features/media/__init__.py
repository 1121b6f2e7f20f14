"""The feature `media`: pictures and sounds, with their tasks, synthetic batches, files, processors and
samples."""
