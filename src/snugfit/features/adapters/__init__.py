"""The feature `adapters`: low-rank adapters on frozen weights, and freezing of parts of a model."""
