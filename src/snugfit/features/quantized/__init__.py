"""The feature `quantized`: matrix products in 8-bit floats, and frozen weights in 4 or 8 bits."""
