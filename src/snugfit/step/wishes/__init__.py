"""One handler for each wish of a `Setup`: its changes to a model, a step, a process or another library."""
