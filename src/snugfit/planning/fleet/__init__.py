"""One plan for many GPUs of the table, and what a run costs on each."""
