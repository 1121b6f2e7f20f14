"""The feature `defaults`: the user's own default values of options, from a file or the environment."""
