"""The results of a simulation: the trace, and its relative form, which can be repeated and joined."""
