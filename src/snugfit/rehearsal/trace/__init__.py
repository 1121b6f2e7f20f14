"""The result of a simulation: the trace, and its relative form, whose events can be repeated and joined."""
