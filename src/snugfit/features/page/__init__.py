"""Answers as pages, pictures and cells of a notebook."""
