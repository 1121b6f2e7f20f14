"""A dispatch mode that observes a step on `meta` and writes its trace."""
