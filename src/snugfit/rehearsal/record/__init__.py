"""The dispatch mode that watches a step run on `meta` and writes its trace."""
