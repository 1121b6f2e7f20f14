"""Pictures and sounds: their tasks, synthetic batches, files, processors and samples."""
