"""Engines that evaluate and generate without torch's eager kernels, such as ONNX Runtime (README.md)."""
