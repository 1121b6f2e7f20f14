"""The feature `trackers`: metrics of a training run for TensorBoard, Weights & Biases and other trackers."""
