"""snugfit: predict, plan, run and measure a training step that has to fit a GPU."""

__version__ = "0.1.0"
