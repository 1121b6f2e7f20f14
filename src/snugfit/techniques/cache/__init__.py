"""Techniques of the slot `cache`: the store of keys and values that generation reads again."""
