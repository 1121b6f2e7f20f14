"""The feature `inference`: predictions of memory and time for text generation by `generate` (README.md)."""
