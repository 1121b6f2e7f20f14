"""The results of a simulation: the trace, and the relative trace, which can be repeated and joined."""
