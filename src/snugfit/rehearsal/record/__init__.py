"""The dispatch mode that runs a step on `meta` and writes its trace."""
