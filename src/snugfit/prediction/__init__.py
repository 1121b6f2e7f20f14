"""What is foreseen: bytes (and later seconds) that follow from a trace."""
