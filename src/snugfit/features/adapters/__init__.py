"""Low-rank adapters beside frozen weights."""
