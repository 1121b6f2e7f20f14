"""The feature `quantized`: products in 8-bit floats, and frozen weights in 4 bits."""
