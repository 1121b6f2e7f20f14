"""Handlers of the fields of a `Setup`: each applies one setting to a model, a step, a process or another
library.
"""
