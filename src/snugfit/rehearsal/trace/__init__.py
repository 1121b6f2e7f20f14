"""What a rehearsal writes: the trace, and the relative trace, which can be repeated and joined."""
