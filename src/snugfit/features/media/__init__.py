"""Training on pictures and sounds: their files, processors and samples."""
