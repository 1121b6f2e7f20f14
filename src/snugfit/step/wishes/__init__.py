"""One handler for each wish of a `Setup`: what it does to a model, a step, a process or another library."""
