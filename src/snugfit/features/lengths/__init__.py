"""A dataset's lengths: ways of padding, their memory and their speed."""
