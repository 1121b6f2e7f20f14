"""Exports of a predicted step: for PyTorch's memory viewer, and as a timeline for Perfetto."""
