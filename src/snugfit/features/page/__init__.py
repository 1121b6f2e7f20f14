"""The feature `page`: results of commands as HTML pages, plots and output of notebook cells."""
