"""The training step: job and recipe become a model, an optimizer and a loop that can be simulated, measured
or trained."""
