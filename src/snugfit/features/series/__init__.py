"""Time series: models that predict the next values of several channels, with their batches."""
