"""One plan for many GPUs of the table, and the cost of a run on each."""
