"""Search all valid recipes for the best one, and explain the result."""
