"""The feature `page`: results as HTML pages, pictures and output of notebook cells."""
