"""The feature `trackers`: metrics of a run for TensorBoard, Weights & Biases and other trackers."""
