"""The wish for DeepSpeed's engine, and the loops that run it."""
