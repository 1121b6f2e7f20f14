"""Exporters of a predicted step: a snapshot for PyTorch's memory viewer, and a timeline for Perfetto."""
