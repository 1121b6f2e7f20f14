"""Metrics of a run for TensorBoard, Weights & Biases and other trackers."""
