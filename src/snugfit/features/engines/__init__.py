"""Inference engines for evaluation and text generation instead of torch's eager kernels, such as ONNX Runtime
(README.md).
"""
