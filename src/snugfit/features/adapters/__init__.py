"""The feature `adapters`: low-rank adapters on frozen weights, and frozen parts of a model."""
